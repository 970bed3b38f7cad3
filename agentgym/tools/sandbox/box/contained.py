"""Box 3: a container of Docker's, which is the wall; inside it a program has the same filter and limits as elsewhere.

All processes of the container have one user. Those around the program cannot be looked into, and PID 1 cannot be
killed; a program that ends the others has ended its own execution, and the container is thrown away.
"""

import contextlib
import os
import signal
from collections.abc import Sequence

from agentgym.tools.sandbox.box import kernel
from agentgym.tools.sandbox.box.folders import empty_folder
from agentgym.tools.sandbox.box.limiting import limit_resources
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.box.processes import kill_until_gone, reap, visible
from agentgym.tools.sandbox.box.seccomp import assemble, install_filter

__all__ = ["HOME", "ContainerBox"]

HOME = "/tmp"
"""Where programs may write: the one file system of the container that is not read-only."""


class ContainerBox:
    """What differs between boxes, in a container."""

    home = HOME
    end_signal = signal.SIGTERM
    """The first process ends all others when it gets this."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._filter = assemble(os.uname().machine, owns_files=True, leaves_group=True, signals=True)
        self._around = {1}
        """Processes that are not the program's."""

    def enclose_server(self) -> None:
        """By PID 1: nobody looks into it, nor into what it forks."""
        kernel.set_dumpable(False)

    def open(self) -> None:
        """By the supervisor, before it starts the box's first process."""
        self._around.add(os.getpid())

    def begin(self) -> None:
        """By the box's first process, to which orphans come."""
        self._around.add(os.getpid())
        kernel.become_subreaper()
        kernel.die_with_parent(signal.SIGTERM)
        os.chdir(HOME)

    def confine(self) -> None:
        """By the program's process, before the first line of it is run."""
        os.setsid()
        kernel.set_dumpable(True)  # /proc/self belongs to it only then
        kernel.drop_capabilities()
        limit_resources(self._plan)
        kernel.forbid_new_privileges()
        install_filter(self._filter)

    def started(self, pid: int) -> None:
        """By the first process: `pid` is the program's."""

    def pids(self, first: int) -> list[int]:
        """The box's processes but its first one."""
        return [pid for pid in visible() if pid not in self._around and pid != first]

    def kill_others(self, keep: int) -> bool:
        """By the first process: ends all but `keep`; False if it cannot."""
        return kill_until_gone(lambda: [pid for pid in self.pids(os.getpid()) if pid != keep])

    def kill_all(self) -> None:
        """By the first process: ends all others."""
        kill_until_gone(lambda: self.pids(os.getpid()))
        reap()

    def scratch_is_full(self, pids: Sequence[int]) -> bool:
        """Whether too much was written: never, for the file system has a size."""
        return False

    def num_ended_for_memory(self) -> int:
        """Processes that the container's cgroup, of either version, has ended for memory so far."""
        for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
        return 0

    def close(self) -> None:
        """By the supervisor, when the box's first process has ended, and all others with it."""

    def is_as_new(self) -> bool:
        """By PID 1 after an execution: ends what is left and removes what was written; False if something stays."""
        if not kill_until_gone(lambda: [pid for pid in visible() if pid != 1]):
            return False
        try:
            empty_folder(HOME)
        except OSError:
            return False
        return True
