"""The most memory that was held."""

from __future__ import annotations

import resource
import sys

import torch

__all__ = ["peak_gpu_memory_mb", "peak_memory_mb"]


def peak_memory_mb() -> float:
    """The most that this process ever had in memory, in MiB; servers and other processes have their own."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024  # bytes there, KiB elsewhere


def peak_gpu_memory_mb() -> float | None:
    """The most that torch ever held on this process's GPU, in MiB; None where it uses none."""
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_initialized() else None
