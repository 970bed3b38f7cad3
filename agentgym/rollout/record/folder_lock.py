"""A lock that lets only one process at a time write in a run's folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Self

from agentgym.errors import RunFolderError

__all__ = ["LOCK_NAME", "FolderLock"]

LOCK_NAME = ".lock"
MAX_OWNER_BYTES = 300
OWN_LINKS = ("wandb",)
"""The folders in a run's folder in which a tracker's library makes links of its own."""
LOCK_ERRORS = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """The right to write in a folder, which ends with the process however it dies; other processes are kept out.

    If the file system has no locks (some network ones), no process is kept out. A folder with links in it is refused:
    in a run from elsewhere they may lead to any file of the user.
    """

    def __init__(self, folder: Path) -> None:
        self._target, self._path = folder, folder / LOCK_NAME
        self._file: int | None = None
        self._owner = 0
        """The process that has the lock: a fork of it has not."""

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Returns the lock of a single file, which lies beside it; the file may be no link either."""
        lock = cls(path.parent)
        lock._target, lock._path = path, path.with_name(f".{path.name}{LOCK_NAME}")
        return lock

    def take(self) -> None:
        """Raises RunFolderError, naming the owner, if another process has the lock; a second call does nothing."""
        if self._file is None:
            self._refuse_links()
        while self._file is None:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise RunFolderError(f"cannot write in {str(self._path.parent)!r}: {error.strerror}") from error
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(file, MAX_OWNER_BYTES).decode(errors="replace")
                os.close(file)
                if error.errno in LOCK_ERRORS:
                    raise self._lock_error(owner) from None
                return
            if self._is_at_its_place(file):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                self._file, self._owner = file, os.getpid()
            else:  # the owner removed the file meanwhile
                os.close(file)

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            if self._owner == os.getpid():
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(file)

    def __del__(self) -> None:
        self.release()

    def _is_at_its_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _refuse_links(self) -> None:
        target = self._target
        for path in (target, self._path) if target != self._path.parent else (*target.glob("*"), *target.glob("*/*")):
            if path.is_symlink() and path.parent.name not in OWN_LINKS:
                raise RunFolderError(f"{str(path)!r} is a link, and nothing is written through links: remove it first")

    def _lock_error(self, owner: str) -> RunFolderError:
        who, folder = owner or "another process", str(self._target)
        return RunFolderError(f"{who} writes in {folder!r} now: wait until it has ended, or give another --output")
