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
    memory_gb_s: float
    """10^9 bytes a second between its memory and its processors."""
    link_gb_s: float
    """10^9 bytes a second to another GPU of the same machine, in one direction: NVLink and the like, or PCI Express."""


GPUS = {
    "B200": GpuDatasheet(half=2250, tf32=1125, single=80, memory_gib=179, memory_gb_s=8000, link_gb_s=900),
    "H200": GpuDatasheet(half=989, tf32=494, single=67, memory_gib=140, memory_gb_s=4800, link_gb_s=450),
    "H100 PCIe": GpuDatasheet(half=756, tf32=378, single=51, memory_gib=79, memory_gb_s=2000, link_gb_s=64),
    "H100": GpuDatasheet(half=989, tf32=494, single=67, memory_gib=79, memory_gb_s=3350, link_gb_s=450),
    "A100": GpuDatasheet(half=312, tf32=156, single=19.5, memory_gib=80, memory_gb_s=2039, link_gb_s=300),
    "L40S": GpuDatasheet(half=362, tf32=183, single=91.6, memory_gib=45, memory_gb_s=864, link_gb_s=32),
    "L4": GpuDatasheet(half=121, tf32=60, single=30.3, memory_gib=22, memory_gb_s=300, link_gb_s=32),
    "RTX 4090": GpuDatasheet(half=165, tf32=82.6, single=82.6, memory_gib=24, memory_gb_s=1008, link_gb_s=32),
    "RTX 3090": GpuDatasheet(half=71, tf32=35.6, single=35.6, memory_gib=24, memory_gb_s=936, link_gb_s=32),
    "MI300X": GpuDatasheet(half=1307, tf32=654, single=163, memory_gib=191, memory_gb_s=5300, link_gb_s=448),
}
"""The figures by a part of the name that torch reports; the first match counts. The A100 is the 80 GB model."""


def gpu_named(name: str) -> GpuDatasheet | None:
    """Returns the figures of the GPU in `GPUS` whose key occurs as words in `name`; None for an unknown GPU."""
    return next((gpu for known, gpu in GPUS.items() if re.search(rf"\b{known}\b", name, re.IGNORECASE)), None)
