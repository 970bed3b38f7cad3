"""What the machine has: GPUs, cores, memory, shared memory, open files, and whether Docker answers."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agentgym.engines.local.machine_memory import total_memory

__all__ = ["Docker", "Gpu", "Machine", "docker", "gpus", "machine"]

ANSWER_S = 20.0
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as its driver tells it."""

    name: str
    memory_gib: float
    driver: str


@dataclass(frozen=True, kw_only=True)
class Docker:
    """The command `docker`, and the daemon behind it."""

    client: str | None
    """Version of the command, None without one."""
    server: str | None
    """Version of the daemon, None where none answers."""
    error: str = ""
    """What the command said when no daemon answered."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sizes that bound what runs here."""

    system: str
    num_cores: int
    """Cores that this process may use."""
    memory_gib: float
    """Of the machine, or of the container's limit."""
    shared_memory_gib: float | None
    """Size of /dev/shm; None where there is none."""
    open_files: int
    """Files and connections that this process may hold open; -1 is no limit."""
    open_files_hard: int
    """What `ulimit -n` may raise it to; -1 is no limit."""


def machine() -> Machine:
    """The sizes of this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = Path("/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=total_memory() / GIB,
        shared_memory_gib=shutil.disk_usage(shared).total / GIB if shared.is_dir() else None,
        open_files=-1 if soft == resource.RLIM_INFINITY else soft,
        open_files_hard=-1 if hard == resource.RLIM_INFINITY else hard,
    )


def gpus() -> list[Gpu]:
    """NVIDIA's GPUs, as `nvidia-smi` lists them; none where it is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    code, printed, _ = _asked(query)
    if code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines() if line.count(",") == 2]
    return [
        Gpu(name=name, memory_gib=float(mib) / 1024 if mib.replace(".", "", 1).isdigit() else 0.0, driver=driver)
        for name, mib, driver in rows
    ]


def docker() -> Docker:
    """Docker's command and daemon."""
    code, printed, said = _asked(["docker", "version", "--format", "{{.Client.Version}}|{{.Server.Version}}"])
    if code is None:
        return Docker(client=None, server=None)
    client, _, server = printed.strip().partition("|")
    if code == 0:
        return Docker(client=client, server=server)
    return Docker(client=client or "?", server=None, error=(said.strip().splitlines() or ["no answer"])[-1])


def _asked(command: list[str]) -> tuple[int | None, str, str]:
    """Exit code, output and errors of a command; the code is None where there is no such command."""
    if shutil.which(command[0]) is None:
        return None, "", ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout, done.stderr
