"""The GPUs of this machine, and which of them servers get beside a learner."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from urllib.parse import urlsplit

__all__ = ["gpus_of_server", "has_gpu_of_its_own", "opens_handles", "visible_gpus"]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ASK_S = 20.0


@cache
def count_gpus() -> int:
    """Returns the number of this machine's NVIDIA GPUs, visible to this process or not."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them: `["0", "1"]`."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return [str(number) for number in range(count_gpus())]
    return [gpu.strip() for gpu in variable.split(",") if gpu.strip()]


def gpus_of_server(number: int, replicas: int, learner: str = "cpu") -> list[str]:
    """Returns the GPUs that the `number`-th of some servers sees, the one that it takes first.

    A single server sees all, and several see one each. A learner's GPU (`learner`: its device, such as `cuda:1`) is
    taken last. Empty without a GPU.
    """
    gpus = visible_gpus()
    if learner.startswith("cuda"):
        after = _index(learner) + 1
        gpus = gpus[after:] + gpus[:after]
    return gpus if replicas == 1 or not gpus else [gpus[number % len(gpus)]]


def has_gpu_of_its_own(replicas: int, learner: str) -> bool:
    """Returns whether none of some servers takes the learner's GPU."""
    server_gpus = [gpus_of_server(number, replicas, learner)[:1] for number in range(replicas)]
    return visible_gpus()[_index(learner) : _index(learner) + 1] not in server_gpus


def opens_handles(server: Sequence[str] | None, url: str, num_ranks: int, index: int) -> bool:
    """Returns whether a server of one rank computes on this process's GPU of this index.

    Only then can it open handles of that GPU's memory. `server` has the GPUs that it sees, and is None if they are
    unknown, as those of a server that runs already. Such a one shares the GPU if this is its machine, with no other.
    """
    if num_ranks > 1:
        return False
    if server is None:
        return urlsplit(url).hostname in _LOOPBACK and count_gpus() == 1
    return bool(server) and visible_gpus()[index : index + 1] == [server[0]]


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
