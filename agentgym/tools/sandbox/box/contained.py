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
from agentgym.tools.sandbox.box.plan import Plan, limit_resources
from agentgym.tools.sandbox.box.processes import kill_until_gone, reap, stop_and_kill, visible
from agentgym.tools.sandbox.box.seccomp import assemble, install_filter

__all__ = ["HOME", "ContainerBox"]

HOME = "/tmp"
"""Where programs may write: the one file system of the container that is not read-only."""


class ContainerBox:
    """What differs between boxes, in a container."""

    home = HOME

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._filter = assemble(os.uname().machine, owns_files=True, leaves_group=True, signals=True)
        self._around = {1}
        """Processes that are not the program's."""
        self._held_before = 0

    def enclose_server(self) -> None:
        """By PID 1: nobody looks into it, nor into what it forks."""
        kernel.set_dumpable(False)

    def open(self) -> None:
        """By the supervisor, before it starts the box's first process."""
        self._around.add(os.getpid())
        self._held_before = _anonymous_bytes()

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
        """By the first process and the supervisor: `pid` is the program's."""

    def pids(self, first: int, most: int = 1 << 22) -> list[int]:
        """The box's processes but its first one, up to `most`."""
        return [pid for pid in visible() if pid not in self._around and pid != first][:most]

    def signal_others(self, number: int) -> None:
        """By the first process: a signal to all others at once, its supervisor too; PID 1 gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)

    def pause(self, first: int) -> None:
        """By the supervisor: nothing, for a cgroup bounds memory."""

    def resume(self, first: int) -> None:
        """By the supervisor: nothing."""

    def end(self, first: int) -> None:
        """By the supervisor: kills all processes but itself and PID 1 at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def kill_others(self, keep: int) -> bool:
        """By the first process: ends all but `keep`, none of which starts another meanwhile; False if it cannot."""
        return stop_and_kill(self.signal_others, lambda: [pid for pid in self.pids(os.getpid()) if pid != keep])

    def kill_all(self) -> None:
        """By the first process: ends all others."""
        self.kill_others(keep=0)
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

    def held_bytes(self) -> int | None:
        """Returns the memory of the program's processes, by the container's cgroup.

        The cgroup's own limit is higher, for it counts files as well.
        """
        return max(0, _anonymous_bytes() - self._held_before)

    def close(self) -> None:
        """By the supervisor, when the box's first process has ended, and all others with it."""

    def is_as_new(self) -> bool:
        """By PID 1 after an execution: ends what is left and removes what was written; False if something stays."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not kill_until_gone(lambda: [pid for pid in visible() if pid != 1]):
            return False
        try:
            empty_folder(HOME)
        except OSError:
            return False
        return True


def _anonymous_bytes() -> int:
    """Returns the memory of all processes of the container, without files; 0 where its cgroup cannot be read."""
    for path, name in (("/sys/fs/cgroup/memory.stat", "anon "), ("/sys/fs/cgroup/memory/memory.stat", "rss ")):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(name)), 0)
    return 0
