"""A lock that lets only one process at a time write in a run's folder."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from agentgym.errors import RunFolderError

__all__ = ["LOCK_NAME", "FolderLock"]

LOCK_NAME = ".lock"
RELEASE_S = 0.1
"""The seconds in which an owner that is about to release the lock may do so."""
NO_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLock:
    """The right to write in a folder, which ends with the process however it dies; other processes are kept out.

    If the file system has no locks (some network ones), no process is kept out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: BaseFileLock | None = None

    def take(self) -> None:
        """Raises RunFolderError, naming the owner, if another process has the lock; a second call does nothing."""
        if self._lock is not None and self._lock.is_locked:
            return
        path = self._folder.resolve() / LOCK_NAME
        lock = FileLock(path, timeout=RELEASE_S, thread_local=False, fallback_to_soft=False, is_singleton=True)
        try:
            self._folder.stat()  # `acquire` would create it
            lock.acquire()
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            raise self._lock_error(path) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RunFolderError(f"cannot write in {str(self._folder)!r}: {error.strerror}") from error
        else:
            self._lock = lock

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None and lock.is_locked:  # a forked process does not have its parent's
            if lock.lock_counter == 1:
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def __del__(self) -> None:
        self.release()

    def _lock_error(self, path: Path) -> RunFolderError:
        try:
            owner = path.read_text(errors="replace")
        except OSError:
            owner = ""
        who, folder = owner or "another process", str(self._folder)
        return RunFolderError(f"{who} writes in {folder!r} now: wait until it has ended, or give another --output")
