"""The resources of the machine: GPUs, cores, memory, shared memory, open files, and Docker."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agentgym.cores import num_cores
from agentgym.engines.local.machine_memory import total_memory

__all__ = ["Docker", "Gpu", "Machine", "docker", "gpus", "machine"]

ANSWER_S = 20.0
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as its driver reports it."""

    name: str
    memory_gib: float
    driver: str


@dataclass(frozen=True, kw_only=True)
class Docker:
    """The command `docker`, and its daemon."""

    client: str | None
    """The version of the command; None without one."""
    server: str | None
    """The version of the daemon; None if none answers."""
    error: str = ""
    """The message of the command when no daemon answered."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sizes that bound what runs here."""

    system: str
    num_cores: int
    """The number of cores that this process may use."""
    memory_gib: float
    """The memory of the machine, or the container's limit."""
    shared_memory_gib: float | None
    """The size of /dev/shm; None if there is none."""
    open_files: int
    """The number of files and connections that this process may hold open; -1 is no limit."""
    open_files_hard: int
    """The limit to which `ulimit -n` may raise it; -1 is no limit."""


def machine() -> Machine:
    """Returns the sizes of this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = Path("/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        num_cores=num_cores(),
        memory_gib=total_memory() / GIB,
        shared_memory_gib=shutil.disk_usage(shared).total / GIB if shared.is_dir() else None,
        open_files=-1 if soft == resource.RLIM_INFINITY else soft,
        open_files_hard=-1 if hard == resource.RLIM_INFINITY else hard,
    )


def gpus() -> list[Gpu]:
    """Returns NVIDIA's GPUs, as `nvidia-smi` lists them; none if it is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    code, printed, _ = _run_command(query)
    if code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines() if line.count(",") == 2]
    return [
        Gpu(name=name, memory_gib=float(mib) / 1024 if mib.replace(".", "", 1).isdigit() else 0.0, driver=driver)
        for name, mib, driver in rows
    ]


def docker() -> Docker:
    """Returns Docker's command and daemon."""
    code, printed, errors = _run_command(["docker", "version", "--format", "{{.Client.Version}}|{{.Server.Version}}"])
    if code is None:
        return Docker(client=None, server=None)
    client, _, server = printed.strip().partition("|")
    if code == 0:
        return Docker(client=client, server=server)
    return Docker(client=client or "?", server=None, error=(errors.strip().splitlines() or ["no answer"])[-1])


def _run_command(command: list[str]) -> tuple[int | None, str, str]:
    """Returns exit code, output and errors of a command; the code is None if there is no such command."""
    if shutil.which(command[0]) is None:
        return None, "", ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout, done.stderr
