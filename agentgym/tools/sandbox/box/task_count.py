"""A cgroup that counts the tasks of one box, if this process may make one in its own: a fork too many fails."""

import contextlib
import os

__all__ = ["TaskCount", "remove_task_counts"]

MOUNT = "/sys/fs/cgroup"
NAME = "agentgym-box"


class TaskCount:
    """A cgroup of up to `max_tasks` tasks below this process's own one; `folder` is empty if none can be made.

    It limits only the count: the limits of the cgroups around it, on memory and processors, apply as before.
    """

    def __init__(self, max_tasks: int) -> None:
        self.folder = ""
        parent = _own_cgroup()
        if not parent:
            return
        folder = f"{parent}/{NAME}-{os.getppid()}-{os.getpid()}"
        with contextlib.suppress(OSError):
            os.mkdir(folder)
            self.folder = folder
            _write(f"{folder}/pids.max", str(max_tasks))

    def join(self) -> None:
        """Puts this process and its future children into the cgroup, unless the kernel refuses."""
        if self.folder:
            with contextlib.suppress(OSError):
                _write(f"{self.folder}/cgroup.procs", "0")

    def close(self) -> None:
        """Removes the cgroup when its processes have ended."""
        if self.folder:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)


def remove_task_counts(server: int) -> None:
    """Removes the cgroups that killed supervisors of a server have left."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(_own_cgroup() or os.devnull):
            if entry.name.startswith(f"{NAME}-{server}-"):
                with contextlib.suppress(OSError):
                    os.rmdir(entry.path)


def _own_cgroup() -> str:
    """Returns the folder of this process's cgroup if tasks are counted in the cgroups below it, else ""."""
    own = {}
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        own = {names: path for _, names, path in (line.rstrip("\n").split(":", 2) for line in file)}
    if "pids" in own:  # the first version of cgroups: a hierarchy of its own
        return f"{MOUNT}/pids{own['pids']}".rstrip("/")
    folder = f"{MOUNT}{own.get('', '')}".rstrip("/")
    with contextlib.suppress(OSError), open(f"{folder}/cgroup.subtree_control", encoding="ascii") as file:
        return folder if "pids" in file.read().split() else ""
    return ""


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
