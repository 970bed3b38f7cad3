"""Landlock, the system-call filter and limits, for where namespaces are refused, as in ordinary containers.

A program keeps its user and shares the machine's PIDs, but opens no file outside, reaches no socket, and signals no
process outside. It cannot leave its process group, so killing the group ends everything it started, at once. It also
has its own session: where the kernel shares processors by session, it competes as one.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Sequence

from agentgym.tools.sandbox.box import kernel
from agentgym.tools.sandbox.box.folders import empty_folder, holds_too_much, make_folders, unlinked_bytes
from agentgym.tools.sandbox.box.landlock import landlock_version, restrict_files
from agentgym.tools.sandbox.box.plan import Plan, limit_resources, parts_without, readable_folders
from agentgym.tools.sandbox.box.processes import descendants, kill_until_gone, reap_children, stop_and_kill
from agentgym.tools.sandbox.box.seccomp import assemble, install_filter
from agentgym.tools.sandbox.box.task_count import TaskCount

__all__ = ["LandlockBox"]

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MAX_FILES = 16384
SIGNALS_STAY_INSIDE = 6
"""The first version of Landlock that keeps signals inside."""


class LandlockBox:
    """The operations that differ between boxes, with Landlock."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._version = landlock_version()
        self._folders = readable_folders(plan)
        self._readable = [part for folder in self._folders for part in parts_without(folder, plan.hidden)]
        self._readable.append("/etc/ld.so.cache")
        self._filter = assemble(os.uname().machine, owns_files=False, leaves_group=False, signals=True)
        self._group = 0
        self.home = ""

    def enclose_server(self) -> None:
        """Makes sure that the kernel has Landlock; raises OSError if not."""
        if self._version < 1:
            raise OSError("the kernel has no Landlock, or it is switched off")
        kernel.become_subreaper()

    def open(self) -> None:
        """Called by the supervisor: makes the execution's own folder, and a cgroup that counts its tasks."""
        self.home = tempfile.mkdtemp(dir=self._plan.scratch)
        make_folders(self.home, self._plan.folders)
        self._task_count = TaskCount(self._plan.num_processes)

    def begin(self) -> None:
        """Called by the box's first process, which adopts orphans."""
        kernel.become_subreaper()
        kernel.die_with_parent(signal.SIGTERM)
        os.chdir(self.home)

    def confine(self) -> None:
        """Called by the program's process before its first line is run."""
        os.setsid()
        self._task_count.join()
        kernel.die_with_parent(signal.SIGKILL)
        kernel.drop_capabilities()
        limit_resources(self._plan)
        kernel.forbid_new_privileges()
        restrict_files(self._version, listed=self._folders, readable=self._readable, devices=DEVICES, write=[self.home])
        if self._version < SIGNALS_STAY_INSIDE:  # then the filter keeps them inside, and names this very process
            install_filter(assemble(os.uname().machine, owns_files=False, leaves_group=False, signals=False))
        else:
            install_filter(self._filter)

    def set_program(self, pid: int) -> None:
        """Called by the first process and the supervisor; `pid` is the program's, and that of its process group."""
        self._group = pid

    def pids(self, first: int, max_pids: int = 1 << 22) -> list[int]:
        """Returns the box's processes except its first one, up to `max_pids`."""
        return descendants(first, max_pids)

    def signal_others(self, number: int) -> None:
        """Called by the first process and the supervisor: signals all of the program's processes at once."""
        if self._group:  # the group 0 is our own, with the server in it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)

    def pause(self, first: int) -> None:
        """Called by the supervisor: stops the program's processes."""
        self.signal_others(signal.SIGSTOP)

    def end(self, first: int) -> None:
        """Called by the supervisor: kills the program's processes, and makes the first process end."""
        self.signal_others(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGTERM)

    def kill_others(self, keep: int) -> bool:
        """Called by the first process: ends all but `keep`, so that none starts another; False if it cannot."""
        return stop_and_kill(self.signal_others, lambda: [pid for pid in descendants(os.getpid()) if pid != keep])

    def kill_all(self) -> None:
        """Called by the first process: ends all others."""
        self.signal_others(signal.SIGKILL)
        kill_until_gone(lambda: descendants(os.getpid()))
        reap_children()

    def scratch_is_full(self, pids: Sequence[int]) -> bool:
        """Returns whether more bytes or more files were written than the box may hold."""
        left = self._plan.scratch_bytes - unlinked_bytes(pids)
        return holds_too_much(self.home, left, MAX_FILES)

    def held_bytes(self) -> int | None:
        """Returns None: no cgroup counts the memory of a box."""
        return None

    def num_ended_for_memory(self) -> int:
        """Returns 0: no cgroup ends processes for memory; the supervisor watches their memory."""
        return 0

    def close(self) -> None:
        """Called by the supervisor when the box's first process has ended, and all others with it."""
        kill_until_gone(lambda: descendants(os.getpid()))  # none, unless the first process was killed
        self._task_count.close()
        with contextlib.suppress(OSError):  # the server removes what is left
            empty_folder(self.home)
            os.rmdir(self.home)
