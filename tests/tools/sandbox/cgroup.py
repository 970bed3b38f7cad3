"""A cgroup for programs that would bring a machine down."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


class Cgroup:
    """A cgroup with bounds of its own, in the first version of cgroups or in the second; needs root."""

    ROOT = Path("/sys/fs/cgroup")

    def __init__(self, *, num_tasks: int, memory_mb: int) -> None:
        self._is_second = (self.ROOT / "cgroup.controllers").exists()
        name = f"agentgym-test-{os.getpid()}"
        if self._is_second:
            (self.ROOT / "cgroup.subtree_control").write_text("+pids +memory")
        parents = [self.ROOT] if self._is_second else [self.ROOT / "pids", self.ROOT / "memory"]
        self.folders = [parent / name for parent in parents]
        for folder in self.folders:
            folder.mkdir()
        (self.folders[0] / "pids.max").write_text(str(num_tasks))
        most = "memory.max" if self._is_second else "memory.limit_in_bytes"
        (self.folders[-1] / most).write_text(str(memory_mb << 20))

    def held_bytes(self) -> int:
        """Memory that its processes hold now, with what they wrote to files that is not on a disk yet."""
        name = "memory.current" if self._is_second else "memory.usage_in_bytes"
        return int((self.folders[-1] / name).read_text())

    def pids(self) -> list[int]:
        return [int(line) for line in (self.folders[0] / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Ends what is left in it."""
        deadline = time.monotonic() + 20
        while pids := self.pids():
            assert time.monotonic() < deadline
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for folder in self.folders:
            folder.rmdir()
