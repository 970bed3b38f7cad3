"""The memory that the processes of a box use together: a cheap bound often, the exact sum when it decides."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["MemoryWatch"]

PAGE = os.sysconf("SC_PAGE_SIZE")
STATE, MINOR_FAULTS, RESIDENT = 0, 7, 21
"""Indices in /proc/PID/stat after the name."""


@dataclass(frozen=True)
class _Usage:
    """The memory figures of one process, in pages."""

    thread: int
    """A thread of the process that has not ended: the first one may end before the others."""
    resident: int
    """The pages in memory, including those that it shares with others since a fork."""
    faults: int
    """The pages that it asked for so far; a page that it stops sharing counts as one."""
    is_running: bool
    """True if it computes, or waits for a core to do so."""


class MemoryWatch:
    """Compares the memory that processes use together with a limit.

    Pages that processes share count once. Only the kernel's walk over all pages knows which ones these are, and it
    takes 5 ms for 200 MiB. So an exact sum is kept, with an upper bound of the pages added since; the sum is computed
    again when the bound passes the limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_pages = max_bytes // PAGE
        self._exact = 0
        self._exact_usages: dict[int, _Usage] = {}
        self.headroom_bytes = max_bytes
        """The bytes that can certainly be added before the limit is passed."""
        self.num_running = 0
        """The number of processes that computed, or waited for a core to do so, at the last check."""

    def is_passed(self, pids: Iterable[int], pause: Callable[[], None], num_bytes: int | None = None) -> bool:
        """Returns whether processes use more than the limit; they are paused for an exact sum, and stay so after it.

        `num_bytes` is their memory in bytes, if a cgroup knows it.
        """
        now = _usages(pids)
        self.num_running = sum(usage.is_running for usage in now.values())
        bound = self._upper_bound(now) if num_bytes is None else num_bytes // PAGE
        if num_bytes is None and bound > self._max_pages:
            pause()
            self._exact_usages = _usages(now)
            self._exact = bound = self._sum(self._exact_usages)
        self.headroom_bytes = (self._max_pages - bound) * PAGE
        return bound > self._max_pages

    def _upper_bound(self, now: dict[int, _Usage]) -> int:
        total = sum(usage.resident for usage in now.values())
        if total <= self._max_pages:
            return total
        added = 0
        for pid, usage in now.items():
            before = self._exact_usages.get(pid, _Usage(pid, 0, 0, False))
            added += max(usage.resident - before.resident, usage.faults - before.faults, 0)
        return min(total, self._exact + added)

    def _sum(self, now: dict[int, _Usage]) -> int:
        """Returns the pages that processes use; stops counting once they are over the limit."""
        total = 0
        for usage in sorted(now.values(), key=lambda usage: usage.resident, reverse=True):
            total += _proportional(usage)
            if total > self._max_pages:
                break
        return total


def _usages(pids: Iterable[int]) -> dict[int, _Usage]:
    return {pid: usage for pid in pids if (usage := _usage(pid)) is not None}


def _usage(pid: int) -> _Usage | None:
    try:
        thread, fields = pid, _stat(pid)
        if fields[STATE] == b"Z":
            thread = max(map(int, os.listdir(f"/proc/{pid}/task")))
            fields = _stat(thread)
        return _Usage(thread, int(fields[RESIDENT]), int(fields[MINOR_FAULTS]), fields[STATE] == b"R")
    except (OSError, IndexError, ValueError):  # it has ended
        return None


def _stat(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _proportional(usage: _Usage) -> int:
    """Returns a process's pages, each divided by the number of processes that share it."""
    try:
        with open(f"/proc/{usage.thread}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 // PAGE for line in file if line.startswith(b"Pss:"))
    except StopIteration:  # the kernel does not report it
        return usage.resident
    except OSError:  # it has ended
        return 0
