"""The folder in which a run's agents have their own ones, and how those of killed runs are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentgym.errors import ConfigError, describe_error

__all__ = ["agents_folder"]

PREFIX = "agentgym-agents-"
LOCK_NAME = "lock"
"""The file whose lock ends with the process that made the folder, however it dies."""


@contextmanager
def agents_folder() -> Iterator[Path]:
    """Yields a new folder, which is removed at the end, as are those that this user's killed runs have left.

    Raises ConfigError if there is no room for one.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            _remove_if_left(path)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise ConfigError(f"there is no folder for agents: {describe_error(error)}") from error
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    """Removes a folder of this user whose process is gone; raises OSError for any other."""
    lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(lock).st_uid == folder.lstat().st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
