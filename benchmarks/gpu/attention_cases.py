"""Measures one layer's attention, forward and backward: by levels, and by the blocks that windows and float32 take.

With cuDNN allowed, torch may build a plan for each shape of a block; whether that costs is seen in fresh batches.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from probe_case import Probe, Workload, shape_of

from agentgym.model import decoder
from agentgym.model.packed_layout import PackedLayout


def layout_of(probe: Probe, kind: str, seed: int) -> tuple[PackedLayout, float]:
    """Returns the layout of a workload, and the seconds to make it."""
    work, started = Workload(kind, probe.shape, seed), time.perf_counter()
    ids_N = torch.from_numpy(np.concatenate([row[:-1] for row in work.rows]))
    mask_N = torch.from_numpy(np.concatenate(work.trained))
    layout = PackedLayout(work.lengths, probe.device, ids_N=ids_N, mask_N=mask_N)
    probe.sync()
    return layout, time.perf_counter() - started


def attend(probe: Probe, layout: PackedLayout, is_flash: bool) -> None:
    """Computes outputs and gradients of random queries, keys and values of one layer."""
    config, size = shape_of(probe.shape), layout.num_tokens + layout.every.num_padding
    shapes = [(size, heads, config.head_width) for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    q, k, v = (torch.randn(s, device=probe.device, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    own = decoder.is_flash_attention
    decoder.is_flash_attention = own if is_flash else lambda *_: False
    try:
        out = decoder._attend(q, k, v, layout, layout.every)
        out.backward(torch.ones_like(out))
    finally:
        decoder.is_flash_attention = own


def measure(probe: Probe, kind: str, is_flash: bool) -> dict[str, Any]:
    """Attends three fresh batches, each twice."""
    report: dict[str, list[float]] = {"layout_s": [], "first_s": [], "again_s": []}
    for seed in range(3):
        layout, built_s = layout_of(probe, kind, seed)
        report["layout_s"].append(round(built_s, 4))
        for name in ("first_s", "again_s"):
            report[name].append(round(probe.seconds(lambda layout=layout: attend(probe, layout, is_flash), 1, 0), 4))
    return {**report, "peak_gb": probe.peak_gb()}


def rows_apart(probe: Probe, kind: str, backend: str) -> dict[str, Any]:
    """Attends each row on its own, causally, without sharing prefixes, by one of torch's backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config, lengths = shape_of(probe.shape), Workload(kind, probe.shape).lengths

    def work() -> None:
        for length in lengths:
            shapes = [(1, heads, length, config.head_width) for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
            q, k, v = (torch.randn(s, device=probe.device, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out.backward(torch.ones_like(out))

    return {"seconds": round(probe.seconds(work, 3, 1), 4)}


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    for kind in ("single", "turns", "long", "verylong"):
        probe.case("levels", lambda kind=kind: measure(probe, kind, True), kind=kind)
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            about = {"kind": kind, "backend": backend}
            probe.case("rows apart", lambda about=about: rows_apart(probe, **about), **about)
    for allowed in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        for kind in ("single", "turns"):
            probe.case("blocks", lambda kind=kind: measure(probe, kind, False), kind=kind, cudnn_allowed=allowed)


if __name__ == "__main__":
    main()
