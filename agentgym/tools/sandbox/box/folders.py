"""Folders that a program leaves: what they hold, and their end, however deep they go and whoever may enter them."""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable

__all__ = ["empty_folder", "holds_too_much", "unlinked_bytes"]

ENTERED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NAMED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_DEPTH = 256
"""Folders within folders: the kernel looks every one of them up at each access."""


def holds_too_much(folder: str, most_bytes: int, most_files: int) -> bool:
    """Returns whether what is below a folder is more than that, or cannot be counted in time.

    That is deeper than `MOST_DEPTH`, or below a folder that its owner cannot list.
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
        except (FileNotFoundError, NotADirectoryError):  # it has gone meanwhile
            continue
        except OSError:
            return True
        if size > most_bytes or number > most_files or depth > MOST_DEPTH:
            return True
    return False


def unlinked_bytes(pids: Iterable[int]) -> int:
    """Bytes of files that have no name any more, and that processes hold open."""
    held: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    about = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                        held[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(held.values())


def empty_folder(folder: str) -> None:
    """Removes all that is in a folder. What a folder in it holds is moved up first, so no path is long."""
    top = os.open(folder, ENTERED)
    names = (f"{os.urandom(8).hex()}-{number}" for number in itertools.count())
    try:
        while found := os.listdir(top):
            for name in found:
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
    inner = os.open(name, ENTERED, dir_fd=top)
    try:
        for one in os.listdir(inner):
            try:
                os.unlink(one, dir_fd=inner)
            except IsADirectoryError:
                _open_to_owner(one, inner)  # who moves a folder writes to it
                os.rename(one, next(iter(names)), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)


def _open_to_owner(name: str, parent: int) -> None:
    """Undoes what umask, mkdir or chmod may have done so that nobody enters."""
    handle = os.open(name, NAMED, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
