"""The plan that a server gets when it starts: where Python is, what its programs may read, and their limits."""

import contextlib
import json
import os
import resource
import sys
from dataclasses import asdict, dataclass

from agentgym.tools.sandbox.box.kernel import limit

__all__ = ["Plan", "limit_resources", "parts_without", "readable_folders"]


@dataclass(frozen=True)
class Plan:
    """Everything about a box that does not change from one execution to the next."""

    backend: str
    packages: tuple[str, ...]
    """The folders that are put on Python's path, and can be read."""
    hidden: str
    """A folder that no program may read, wherever it is."""
    scratch: str
    """The server's own folder, for boxes that have no file system of their own."""
    memory_bytes: int
    scratch_bytes: int
    output_bytes: int
    time_limit_s: float
    num_processes: int
    num_open_files: int
    folders: tuple[str, ...] = ()
    """The further folders where programs may write, such as home/user: below the working folder, and at the same path
    below the root where a box has a root of its own."""

    def to_json(self) -> str:
        """Returns the plan as one argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads a plan that `to_json` wrote."""
        settings = json.loads(text)
        return cls(**{**settings, "packages": tuple(settings["packages"]), "folders": tuple(settings["folders"])})

    def environment(self, home: str) -> dict[str, str]:
        """Returns the whole environment of a program: nothing in it comes from the process that started us."""
        path = [os.path.join(sys.base_prefix, "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": ":".join(dict.fromkeys(path)),
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "PYTHONPATH": ":".join(self.packages),
            "OMP_NUM_THREADS": "1",
        }


def readable_folders(plan: Plan) -> list[str]:
    """Returns the folders to read and run from: the system's, Python's and the packages'; none is inside another."""
    folders = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives"]
    folders += [os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, *plan.packages)]
    chosen: list[str] = []
    for folder in sorted({path for path in folders if os.path.isdir(path) and not os.path.islink(path)}):
        if not any(folder.startswith(f"{other}/") for other in chosen):
            chosen.append(folder)
    return chosen


def parts_without(folder: str, hidden: str) -> list[str]:
    """Returns the content of a folder without a hidden folder in it, or the folder itself if that is elsewhere."""
    if not f"{hidden}/".startswith(f"{folder}/"):
        return [folder]
    parts: list[str] = []
    if folder == hidden:
        return parts
    for name in os.path.relpath(hidden, folder).split("/"):
        parts += [entry.path for entry in os.scandir(folder) if entry.name != name and not entry.is_symlink()]
        folder = os.path.join(folder, name)
    return parts


def limit_resources(plan: Plan) -> None:
    """Limits memory, processor time, file sizes and open files of this process permanently; no core dumps."""
    limit(resource.RLIMIT_AS, plan.memory_bytes)
    limit(resource.RLIMIT_CPU, int(plan.time_limit_s) + 2)
    limit(resource.RLIMIT_FSIZE, plan.scratch_bytes)
    limit(resource.RLIMIT_NOFILE, plan.num_open_files)
    limit(resource.RLIMIT_MEMLOCK, 0)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_MSGQUEUE, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # if the machine runs out of memory, this process is killed first
