"""The processes of a box: which there are, what memory they hold, and their end."""

import codecs
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

__all__ = ["descendants", "kill_until_gone", "reap", "resident_bytes", "visible"]

KILLING_S = 2.0
PAGE = os.sysconf("SC_PAGE_SIZE")
codecs.lookup("ascii")  # a signal that interrupts its import would find it unknown


def visible() -> list[int]:
    """All processes in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def descendants(root: int) -> list[int]:
    """What `root` started, and what that started; orphans of a subreaper are its children."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children", encoding="ascii") as children:
                    waiting += map(int, children.read().split())
        if one != root:
            found.append(one)
    return found


def resident_bytes(pids: Iterable[int], enough: int) -> int:
    """Memory that processes hold. Pages that they share count once where that decides whether it is over `enough`."""
    listed = list(pids)
    total = sum(_statm(pid) for pid in listed)
    return total if total <= enough else sum(_proportional(pid) for pid in listed)


def _statm(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):  # it has ended
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _statm(pid)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def kill_until_gone(others: Callable[[], Iterable[int]]) -> bool:
    """Kills the processes that `others` lists until it lists none that is alive; False if that takes too long.

    A process that is being killed cannot start another one, so each round leaves only what was started during it.
    """
    deadline = time.monotonic() + KILLING_S
    while time.monotonic() < deadline:
        alive = [pid for pid in others() if _is_alive(pid)]
        if not alive:
            return True
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.0005)
    return False


def reap() -> list[tuple[int, int]]:
    """Children that have ended: process and exit code, negative for the signal that ended it."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((one[0], os.waitstatus_to_exitcode(one[1])))
    return ended
