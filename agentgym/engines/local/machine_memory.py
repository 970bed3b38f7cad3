"""The memory of this machine, or of the container that this process is in."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["LARGE_PAGE", "available_memory", "lazy_zeros", "total_memory"]

CGROUP = Path("/sys/fs/cgroup")
FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""The files with a container's limit, its use and its share of file cache, for control groups of version 2 and 1."""

LARGE_PAGE = 2 << 20
"""The bytes of a large page, all of which are taken as soon as one of them is used."""


def total_memory() -> int:
    """Returns the bytes that this process shares with others: the machine's, or the limit of its container."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def available_memory() -> int:
    """Returns the bytes that are free, or would be without the file cache."""
    left = (max(0, limit - used) for limit, used in _limits())
    return min([int(psutil.virtual_memory().available), *left])


def _limits() -> Iterator[tuple[int, int]]:
    """Yields the limit and the use of each control group that has a limit."""
    for limit, used, statistics, cache in FILES:
        try:
            limit_bytes, used_bytes = (int((CGROUP / name).read_text()) for name in (limit, used))
            rows = dict(line.split() for line in (CGROUP / statistics).read_text().splitlines())
        except (OSError, ValueError):  # no such control group, or `max`
            continue
        yield limit_bytes, used_bytes - int(rows.get(cache, 0))


def lazy_zeros(num_bytes: int, *, in_large_pages: bool = True) -> mmap.mmap:
    """Returns zeroed pages of the system, which take no memory until they are used.

    Large ones, where the system has them, are read faster.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE if in_large_pages else mmap.MADV_NOHUGEPAGE)
    return pages
