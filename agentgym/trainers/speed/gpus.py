"""The vendors' figures of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["GPUS", "GpuDatasheet", "gpu_named"]


@dataclass(frozen=True, kw_only=True)
class GpuDatasheet:
    """A vendor's figures, without sparsity."""

    half: float
    """TFLOP/s in bfloat16 and float16, with float32 sums."""
    tf32: float
    single: float
    memory_gib: float
    """The memory that the driver reports."""


GPUS = {
    "B200": GpuDatasheet(half=2250, tf32=1125, single=80, memory_gib=179),
    "H200": GpuDatasheet(half=989, tf32=494, single=67, memory_gib=140),
    "H100 PCIe": GpuDatasheet(half=756, tf32=378, single=51, memory_gib=79),
    "H100": GpuDatasheet(half=989, tf32=494, single=67, memory_gib=79),
    "A100": GpuDatasheet(half=312, tf32=156, single=19.5, memory_gib=80),
    "L40S": GpuDatasheet(half=362, tf32=183, single=91.6, memory_gib=45),
    "L4": GpuDatasheet(half=121, tf32=60, single=30.3, memory_gib=22),
    "RTX 4090": GpuDatasheet(half=165, tf32=82.6, single=82.6, memory_gib=24),
    "RTX 3090": GpuDatasheet(half=71, tf32=35.6, single=35.6, memory_gib=24),
    "MI300X": GpuDatasheet(half=1307, tf32=654, single=163, memory_gib=191),
}
"""The figures by a part of the name that torch reports; the first match counts. The A100 is the 80 GB model."""


def gpu_named(name: str) -> GpuDatasheet | None:
    """Returns the figures of the GPU in `GPUS` whose key occurs as words in `name`; None for an unknown GPU."""
    return next((gpu for gpu_name, gpu in GPUS.items() if re.search(rf"\b{gpu_name}\b", name, re.IGNORECASE)), None)
