"""Folders that a program leaves: their size and their removal, at any depth and with any permissions."""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable

__all__ = ["empty_folder", "holds_too_much", "make_folders", "unlinked_bytes"]

OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 256
"""The deepest nesting of folders: the kernel looks every one of them up at each access."""


def holds_too_much(folder: str, max_bytes: int, max_files: int) -> bool:
    """Returns whether a folder's content is over the limits, or cannot be counted in time.

    It cannot be counted if it is deeper than `MAX_DEPTH`, or below a folder that its owner cannot list.
    """
    size = number = 0
    waiting = [(folder, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    number += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):  # it is gone meanwhile
            continue
        except OSError:
            return True
        if size > max_bytes or number > max_files or depth > MAX_DEPTH:
            return True
    return False


def make_folders(top: str, names: Iterable[str]) -> None:
    """Makes folders in which every user may write."""
    for name in names:
        path = os.path.join(top, name)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o777)


def unlinked_bytes(pids: Iterable[int]) -> int:
    """Returns the bytes of unlinked files that processes hold open."""
    bytes_by_file: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    about = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                        bytes_by_file[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(bytes_by_file.values())


def empty_folder(folder: str) -> None:
    """Removes everything in a folder. The content of its folders is moved up first, so that no path is long."""
    top = os.open(folder, OPEN_FLAGS)
    names = (f"{os.urandom(8).hex()}-{number}" for number in itertools.count())
    try:
        while entries := os.listdir(top):
            for name in entries:
                try:
                    os.unlink(name, dir_fd=top)
                except IsADirectoryError:
                    _open_to_owner(name, top)
                    _move_up(name, top, names)
                    os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _move_up(name: str, top: int, names: Iterable[str]) -> None:
    """Removes the files of a folder, and moves its folders to the top."""
    inner = os.open(name, OPEN_FLAGS, dir_fd=top)
    try:
        for entry in os.listdir(inner):
            try:
                os.unlink(entry, dir_fd=inner)
            except IsADirectoryError:
                _open_to_owner(entry, inner)  # moving a folder needs the right to write to it
                os.rename(entry, next(iter(names)), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)


def _open_to_owner(name: str, parent: int) -> None:
    """Gives the owner access to a folder, whatever umask, mkdir or chmod did to its mode."""
    handle = os.open(name, PATH_FLAGS, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
