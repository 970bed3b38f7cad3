"""The most that the learner's device could compute: what a step's operations are held against."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from agentgym.engines.hf_linear import linear
from agentgym.errors import ConfigError
from agentgym.trainers.parallel import GradientWorkers

__all__ = ["GPUS", "SpeedConfig", "peak_flops"]

_SIZE, _REPEATS = 512, 12
"""A product of this size fits into a core's cache and is as fast as any."""


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """What the speed of a step is held against."""

    peak_tflops: float | None = None
    """The most that the learner's devices compute, in 10^12 operations a second, for `mfu` in metrics.jsonl. None
    measures a short matrix product at the start on CPU, and takes the vendor's figure of a GPU that is known."""

    def __post_init__(self) -> None:
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(f"speed.peak_tflops must be above 0, got {self.peak_tflops}; leave it out to measure it")


@dataclass(frozen=True, kw_only=True)
class _Gpu:
    """A vendor's figures, in TFLOP/s, without sparsity."""

    half: float
    """bfloat16 and float16 with float32 sums."""
    tf32: float
    single: float


GPUS = {
    "B200": _Gpu(half=2250, tf32=1125, single=80),
    "H200": _Gpu(half=989, tf32=494, single=67),
    "H100 PCIe": _Gpu(half=756, tf32=378, single=51),
    "H100": _Gpu(half=989, tf32=494, single=67),
    "A100": _Gpu(half=312, tf32=156, single=19.5),
    "L40S": _Gpu(half=362, tf32=183, single=91.6),
    "L4": _Gpu(half=121, tf32=60, single=30.3),
    "RTX 4090": _Gpu(half=165, tf32=82.6, single=82.6),
    "RTX 3090": _Gpu(half=71, tf32=35.6, single=35.6),
    "MI300X": _Gpu(half=1307, tf32=654, single=163),
}
"""By a part of the name that torch shows; the first that fits holds."""


def peak_flops(device: torch.device, dtype: torch.dtype, num_threads: int) -> float | None:
    """Operations a second that the learner could reach at most; None for a GPU that is not known.

    On CPU it is measured: `num_threads` at once each multiply square matrices on one core, as the learner's threads
    do, and the fastest of a few products counts. It takes about a tenth of a second.
    """
    if device.type == "cpu":
        return _measured(dtype, num_threads)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((gpu for known, gpu in GPUS.items() if re.search(rf"\b{known}\b", name)), None)
    if found is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return found.half * 1e12
    return (found.tf32 if torch.backends.cuda.matmul.allow_tf32 else found.single) * 1e12


def _measured(dtype: torch.dtype, num_threads: int) -> float:
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
