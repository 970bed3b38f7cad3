"""Measures a learner's step: seconds, MFU, memory and kernels, by workload, attention, checkpointing, head and dtype.

`attention: blocks` is what runs where the flash kernel does not: a call for each 128 rows of a sequence, with a bias.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from probe_case import PEAK_FLOPS, Probe, Workload, make_learner, make_model

from agentgym.model import decoder
from agentgym.model.model_folder import on_device


def learn(
    probe: Probe, kind: str, *, attention: str = "levels", kernels: bool = False, dtype: str = "bfloat16", **config: Any
) -> dict[str, Any]:
    """Takes steps on batches of shapes that have not been seen, and on one that has."""
    model = on_device(make_model(probe.shape, probe.device, getattr(torch, dtype)), probe.device)
    learner = make_learner(model, device=probe.device, dtype=dtype, **config)
    is_flash = decoder.is_flash_attention
    if attention == "blocks":
        decoder.is_flash_attention = lambda *_: False
    try:
        works = [Workload(kind, probe.shape, seed) for seed in range(3)]
        fresh = []
        for work in works:
            batch = work.batch()
            probe.sync()
            started = time.perf_counter()
            learner.update(batch)
            probe.sync()
            fresh.append(round(time.perf_counter() - started, 3))
        seconds, flops = probe.seconds(lambda: learner.update(batch), 2, 0), works[-1].step_flops(model.config)
        report = {
            "first_s": fresh[0],
            "fresh_s": fresh[1:],
            "seconds": round(seconds, 3),
            "logprobs_s": round(probe.seconds(lambda: learner.logprobs(batch), 2), 3),
            "tokens": sum(works[-1].lengths),
            "trained": works[-1].num_trained,
            "tokens_per_s": round(sum(works[-1].lengths) / seconds),
            "mfu": round(flops / seconds / PEAK_FLOPS, 4),
            "mfu_fresh": round(flops / statistics.median(fresh[1:]) / PEAK_FLOPS, 4),
            "peak_gb": probe.peak_gb(),
        }
        return report | (probe.kernels(lambda: learner.update(batch)) if kernels else {})
    finally:
        decoder.is_flash_attention = is_flash
        learner.close()


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    cases: list[dict[str, Any]] = [
        {"kind": "single", "dtype": "float32", "micro_batch_tokens": 8192},
        {"kind": "single", "kernels": True},
        {"kind": "single", "head_kernel": "liger"},
        {"kind": "turns"},
        {"kind": "long", "kernels": True},
        {"kind": "verylong", "micro_batch_tokens": 32_768, "activation_checkpointing": True},
        {"kind": "single", "activation_checkpointing": True},
        {"kind": "single", "attention": "blocks"},
        {"kind": "long", "attention": "blocks"},
    ]
    for about in cases:
        probe.case("learn", lambda about=about: learn(probe, **about), shape=probe.shape, **about)


if __name__ == "__main__":
    main()
