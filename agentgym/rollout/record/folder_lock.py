"""A lock that lets only one process at a time write in a run's folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from agentgym.errors import RunFolderError

__all__ = ["LOCK_NAME", "FolderLock"]

LOCK_NAME = ".lock"
MAX_OWNER_BYTES = 300
TAKEN = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """The right to write in a folder, which ends with the process however it dies; other processes are kept out.

    If the file system has no locks (some network ones), no process is kept out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._file: int | None = None
        self._owner = 0
        """The process that has the lock: a fork of it has not."""

    def take(self) -> None:
        """Raises RunFolderError, naming the owner, if another process has the lock; a second call does nothing."""
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
                if error.errno in TAKEN:
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

    def _lock_error(self, owner: str) -> RunFolderError:
        who, folder = owner or "another process", str(self._path.parent)
        return RunFolderError(f"{who} writes in {folder!r} now: wait until it has ended, or give another --output")
