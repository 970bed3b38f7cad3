"""The limits of a box that are watched from outside: processes, memory and disk."""

import math
import os
import time
from collections.abc import Callable

from agentgym.tools.sandbox.box import kernel
from agentgym.tools.sandbox.box.memory import MemoryWatch
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.box.processes import num_tasks
from agentgym.tools.sandbox.box.runner import Box

__all__ = ["WATCH_S", "BoxWatch"]

WATCH_S = 0.02
"""The longest time in seconds between two checks of processes and memory, if these are quick."""
FIRST_S = 0.01
"""The seconds before the first check: most programs and cells have ended by then, and cost none."""
SOONEST_S = 0.002
BYTES_PER_CORE_S = 3 << 29
"""The fastest observed rate at which a core fills memory, and half as much again."""
SHARE = 4
"""The pause after a check, as a multiple of the processor time that it took; a disk check has a longer one."""
DISK_SHARE = 10
RESUMED_SHARE = 8
"""The number of checks after which all paused processes are resumed, if they are few."""
FAIR_SHARE = 2
"""The number of processes whose weight all processes that compute at once may have together."""
NICE_STEP = 1.25
"""The factor between the weights of two processes whose nice values differ by one (`sched(7)`)."""


class BoxWatch:
    """Checks a box, often enough for each limit and rarely enough to be cheap."""

    def __init__(self, box: Box, plan: Plan, resume: Callable[[list[int]], None]) -> None:
        """`resume` makes the first process of the box resume processes of it, all of them for an empty list."""
        self._box, self._plan, self._resume = box, plan, resume
        self._memory = MemoryWatch(plan.memory_bytes)
        self._cores = len(os.sched_getaffinity(0))
        self._next_look = self._next_disk = 0.0
        self._runs_soon = False
        self._paused: list[int] = []

    def begin(self) -> None:
        """Begins to watch one execution."""
        self._next_look = max(self._next_look, time.monotonic() + FIRST_S)

    def wait_s(self) -> float:
        """Returns the seconds until the next check is due."""
        return max(0.0, self._next_look - time.monotonic())

    def nice(self) -> int:
        """Returns the nice value at which the processes that compute take no more than a fair share of the cores."""
        return min(19, math.ceil(math.log(max(1.0, self._memory.num_running / FAIR_SHARE), NICE_STEP)))

    def look(self, first: int) -> str:
        """Returns the limit that a box passes, or ""; `first` is its first process."""
        now, before = time.monotonic(), time.thread_time()
        if now < self._next_look:
            return ""
        if not self._runs_soon:  # the supervisor makes the checks
            kernel.run_soon()
            self._runs_soon = True
        pids = self._pids(first)
        reason = ""
        if num_tasks(pids) > self._plan.num_processes:
            reason = "process_limit"
        elif self._memory.is_passed(pids, lambda: self._pause(first, pids), self._box.held_bytes()):
            reason = "memory"
        took = time.thread_time() - before
        until_full = self._memory.headroom_bytes / (BYTES_PER_CORE_S * min(self._cores, len(pids) or 1))
        # However long a look took: 28 processes that share pages are summed in 100 ms, and fill a box in less than 400.
        # And time in which others had the core is part of the pause.
        pause = max(SOONEST_S, min(WATCH_S, max(until_full, SHARE * took)))
        if self._paused and not reason:
            self._resume_some(pids)
            pause = SOONEST_S
        self._next_look = now + took + pause
        return reason or self._look_at_disk(pids)

    def _pause(self, first: int, pids: list[int]) -> None:
        self._box.pause(first)
        self._paused = list(pids)

    def _resume_some(self, pids: list[int]) -> None:
        """Resumes a few paused processes: all at once would keep the core from their supervisor for 100 ms and more.

        The last time, all that are left: those that were started after the list was made were stopped with the others.
        """
        number = -(-len(self._paused) // RESUMED_SHARE)
        resumed, self._paused = self._paused[:number], self._paused[number:]
        paused_pids = [pid for pid in resumed if pid in pids]
        if paused_pids or not self._paused:
            self._resume(paused_pids if self._paused else [])

    def _look_at_disk(self, pids: list[int]) -> str:
        if time.monotonic() < self._next_disk:
            return ""
        before = time.thread_time()
        is_full = self._box.scratch_is_full(pids)
        self._next_disk = time.monotonic() + max(WATCH_S, DISK_SHARE * (time.thread_time() - before))
        return "disk_limit" if is_full else ""

    def _pids(self, first: int) -> list[int]:
        """Returns the processes of the box, up to one more than allowed."""
        return self._box.pids(first, self._plan.num_processes + 1)
