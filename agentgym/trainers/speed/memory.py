"""The peak memory of the process and its GPU."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

__all__ = ["peak_gpu_memory_mb", "peak_memory_mb"]


def peak_memory_mb() -> float:
    """Returns the peak memory of this process, in MiB; servers and other processes are not in it.

    Linux counts the process that started this one in `ru_maxrss`, but not in `VmHWM`.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024  # bytes there, KiB elsewhere


def peak_gpu_memory_mb() -> float | None:
    """Returns the peak memory that torch allocated on this process's GPU, in MiB; None without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_initialized() else None
