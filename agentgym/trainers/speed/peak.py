"""The peak operations per second of the learner's device, to which a step's operations are compared."""

from __future__ import annotations

import time

import torch

from agentgym.model.linear import linear
from agentgym.trainers.parallel.gradient_threads import GradientWorkers
from agentgym.trainers.speed.gpus import gpu_named

__all__ = ["peak_flops"]

_SIZE, _REPEATS = 512, 12
"""A product of this size fits into a core's cache and is as fast as any."""


def peak_flops(device: torch.device, dtype: torch.dtype, num_threads: int) -> float | None:
    """Returns the most operations a second that the learner could reach; None for an unknown GPU.

    On CPU it is measured: `num_threads` threads each multiply square matrices on one core at once, as the learner's
    threads do, and the fastest of a few products counts. It takes about a tenth of a second.
    """
    if device.type == "cpu":
        return _measure_flops(dtype, num_threads)
    if device.type != "cuda":
        return None
    gpu = gpu_named(torch.cuda.get_device_name(device))
    if gpu is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return gpu.half * 1e12
    return (gpu.tf32 if torch.backends.cuda.matmul.allow_tf32 else gpu.single) * 1e12


def _measure_flops(dtype: torch.dtype, num_threads: int) -> float:
    workers = GradientWorkers(num_threads)
    try:
        return sum(workers.map(lambda _: _best_product(dtype), range(num_threads)))
    finally:
        workers.close()


@torch.no_grad()
def _best_product(dtype: torch.dtype) -> float:
    a_XX, b_XX = torch.ones(_SIZE, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        linear(a_XX, b_XX)
        seconds.append(time.perf_counter() - started)
    return float(2 * _SIZE**3 / min(seconds))
