"""A Docker container, which isolates a program; inside, the same filter and limits apply as in other boxes.

All processes of the container have one user. A program cannot inspect those around it, and cannot kill PID 1. If it
ends the others, it has ended its own execution, and the container is discarded.
"""

import contextlib
import os
import signal
from collections.abc import Sequence

from agentgym.tools.sandbox.box import kernel
from agentgym.tools.sandbox.box.folders import empty_folder
from agentgym.tools.sandbox.box.plan import Plan, limit_resources
from agentgym.tools.sandbox.box.processes import kill_until_gone, reap_children, stop_and_kill, visible_pids
from agentgym.tools.sandbox.box.seccomp import assemble, install_filter

__all__ = ["HOME", "ContainerBox"]

HOME = "/tmp"
"""The folder where programs may write: the one file system of the container that is not read-only."""


class ContainerBox:
    """The operations that differ between boxes, in a container."""

    home = HOME

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._filter = assemble(os.uname().machine, owns_files=True, leaves_group=True, signals=True)
        self._around = {1}
        """The PIDs of processes that are not the program's."""
        self._held_before = 0

    def enclose_server(self) -> None:
        """Called by PID 1: protects it, and the processes it forks, from inspection."""
        kernel.set_dumpable(False)

    def open(self) -> None:
        """Called by the supervisor before it starts the box's first process."""
        self._around.add(os.getpid())
        self._held_before = _anonymous_bytes()

    def begin(self) -> None:
        """Called by the box's first process, which adopts orphans."""
        self._around.add(os.getpid())
        kernel.become_subreaper()
        kernel.die_with_parent(signal.SIGTERM)
        os.chdir(HOME)

    def confine(self) -> None:
        """Called by the program's process before its first line is run."""
        os.setsid()
        kernel.set_dumpable(True)  # /proc/self belongs to it only then
        kernel.drop_capabilities()
        limit_resources(self._plan)
        kernel.forbid_new_privileges()
        install_filter(self._filter)

    def set_program(self, pid: int) -> None:
        """Called by the first process and the supervisor; `pid` is the program's."""

    def pids(self, first: int, max_pids: int = 1 << 22) -> list[int]:
        """Returns the box's processes except its first one, up to `max_pids`."""
        return [pid for pid in visible_pids() if pid not in self._around and pid != first][:max_pids]

    def signal_others(self, number: int) -> None:
        """Called by the first process: signals all others at once, its supervisor too, but not PID 1."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)

    def pause(self, first: int) -> None:
        """Called by the supervisor: does nothing, because a cgroup bounds memory."""

    def end(self, first: int) -> None:
        """Called by the supervisor: kills all processes except itself and PID 1 at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def kill_others(self, keep: int) -> bool:
        """Called by the first process: ends all but `keep`, so that none starts another; False if it cannot."""
        return stop_and_kill(self.signal_others, lambda: [pid for pid in self.pids(os.getpid()) if pid != keep])

    def kill_all(self) -> None:
        """Called by the first process: ends all others."""
        self.kill_others(keep=0)
        reap_children()

    def scratch_is_full(self, pids: Sequence[int]) -> bool:
        """Returns False: the size of the file system limits what can be written."""
        return False

    def num_ended_for_memory(self) -> int:
        """Returns the number of processes that the container's cgroup (v1 or v2) has killed for memory so far."""
        for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
        return 0

    def held_bytes(self) -> int | None:
        """Returns the memory of the program's processes, by the container's cgroup.

        The cgroup's own limit is higher, because it counts files as well.
        """
        return max(0, _anonymous_bytes() - self._held_before)

    def close(self) -> None:
        """Called by the supervisor when the box's first process has ended, and all others with it."""

    def is_as_new(self) -> bool:
        """Called by PID 1 after an execution: ends leftover processes and removes files; False if something stays."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not kill_until_gone(lambda: [pid for pid in visible_pids() if pid != 1]):
            return False
        try:
            empty_folder(HOME)
        except OSError:
            return False
        return True


def _anonymous_bytes() -> int:
    """Returns the memory of all processes of the container, without files; 0 if its cgroup cannot be read."""
    for path, name in (("/sys/fs/cgroup/memory.stat", "anon "), ("/sys/fs/cgroup/memory/memory.stat", "rss ")):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(name)), 0)
    return 0
