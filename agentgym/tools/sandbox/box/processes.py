"""The processes of a box: their list, the number of their tasks, and their end."""

import codecs
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

__all__ = [
    "descendants",
    "kill_until_gone",
    "lower_priority",
    "num_tasks",
    "reap_children",
    "resume",
    "stop_and_kill",
    "visible_pids",
]

KILLING_S = 2.0
codecs.lookup("ascii")  # a signal that interrupts its import would find it unknown


def visible_pids() -> list[int]:
    """Returns all processes in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def descendants(root: int, max_pids: int = 1 << 22) -> list[int]:
    """Returns the processes that `root` started, and those that they started, up to `max_pids` of them.

    Orphans of a subreaper are its children.
    """
    pids: list[int] = []
    waiting = [root]
    while waiting and len(pids) < max_pids:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as children:
                    waiting += map(int, children.read().split())
        if pid != root:
            pids.append(pid)
    return pids


def num_tasks(pids: Iterable[int]) -> int:
    """Returns the number of threads of processes; a process that has ended and was not waited for counts as one."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has gone
            total += os.stat(f"/proc/{pid}/task").st_nlink - 2
    return total


def lower_priority(pids: Iterable[int], nice: int, holder: int) -> None:
    """Raises threads of processes `pids` that compute to at least that nice value, except for the children of `holder`.

    A nice value can never be lowered again, and a child of the process that holds a session's state is the next holder.
    """
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # each has a priority of its own
                state, parent = _stat(thread)[:2]
                if state == "R" and int(parent) != holder and os.getpriority(os.PRIO_PROCESS, thread) < nice:
                    os.setpriority(os.PRIO_PROCESS, thread, nice)


def resume(pids: Iterable[int]) -> None:
    """Resumes stopped processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in "ZX" or num_tasks([pid]) > 1  # the first thread may end before the others
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name: the state, the parent and so on."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def kill_until_gone(others: Callable[[], Iterable[int]]) -> bool:
    """Kills the processes that `others` lists until none of them is alive; False if that takes too long.

    A process that is being killed cannot start another one, so each round leaves only what was started during it. One
    that ends while `others` walks a tree hands its children to one that the walk has left: the list must be the same
    twice.
    """
    deadline = time.monotonic() + KILLING_S
    previous: list[int] | None = None
    while time.monotonic() < deadline:
        pids = list(others())
        alive = [pid for pid in pids if _is_alive(pid)]
        if not alive and pids == previous:
            return True
        previous = pids
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_children()
        if alive:
            time.sleep(0.0005)
    return False


def stop_and_kill(signal_all: Callable[[int], None], others: Callable[[], list[int]]) -> bool:
    """Stops all processes of a box while the `others` are killed, so that none starts another; False if that fails.

    They are stopped only if there is something to kill: after each stop, the process that goes on waits for a core.
    """
    are_gone = True
    if others():
        signal_all(signal.SIGSTOP)
        are_gone = kill_until_gone(others)
    signal_all(signal.SIGCONT)
    return are_gone


def reap_children() -> list[tuple[int, int]]:
    """Reaps children that have ended; returns PID and exit code, which is negative for the signal that ended it."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((child[0], os.waitstatus_to_exitcode(child[1])))
    return ended
