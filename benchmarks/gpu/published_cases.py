"""Measures a learner's step of published models: with windows, sinks and experts, of transformers, and with adapters.

`attention: blocks` is what ran before windows and sinks were calls of the flash kernel.
"""

from __future__ import annotations

import time
from typing import Any

from probe_case import Probe, Workload, make_learner, make_model, make_published

from agentgym.model import pass_attention
from agentgym.trainers.settings.lora import LoraConfig


def learn(
    probe: Probe, model: str, kind: str, *, attention: str = "levels", lora_rank: int = 0, **config: Any
) -> dict[str, Any]:
    """Takes steps on a batch; the first includes what is done once."""
    is_flash = pass_attention.is_flash_attention
    if attention == "blocks":
        pass_attention.is_flash_attention = lambda *_: False
    is_ours = "-" not in model
    started = time.perf_counter()
    model_here = (
        make_model("tiny" if probe.is_tiny else model, probe.device) if is_ours else make_published(model, probe)
    )
    size = sum(parameter.numel() for parameter in model_here.parameters())
    probe.sync()
    made_s = time.perf_counter() - started
    learner = make_learner(model_here, device=probe.device, lora=LoraConfig(rank=lora_rank, seed=0), **config)
    try:
        work = Workload(kind, probe.shape)
        batch = work.batch()
        first_s = probe.seconds(lambda: learner.update(batch), 1, 0)
        seconds = probe.seconds(lambda: learner.update(batch), 2, 0)
        return {
            "parameters": size,
            "made_s": round(made_s, 1),
            "first_s": round(first_s, 3),
            "seconds": round(seconds, 3),
            "tokens": sum(work.lengths),
            "tokens_per_s": round(sum(work.lengths) / seconds),
            "peak_gb": probe.peak_gb(),
            **(probe.kernels(lambda: learner.update(batch)) if attention == "levels" else {}),
        }
    finally:
        pass_attention.is_flash_attention = is_flash
        learner.close()


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    recomputing = {"activation_checkpointing": True}
    cases: list[dict[str, Any]] = [
        {"model": "gemma-3-1b", "kind": "long", **recomputing},
        {"model": "gemma-3-1b", "kind": "long", "attention": "blocks", **recomputing},
        {"model": "gemma-3-1b", "kind": "single", **recomputing},
        {"model": "4B", "kind": "long", "lora_rank": 32, **recomputing},
        {"model": "gpt-oss-20b", "kind": "single", "lora_rank": 16, **recomputing},
        {"model": "gpt-oss-20b", "kind": "long", "lora_rank": 16, **recomputing},
        {"model": "qwen3-30b-a3b", "kind": "single", "lora_rank": 16, **recomputing},
    ]
    for about in cases:
        probe.case("learn", lambda about=about: learn(probe, **about), **about)


if __name__ == "__main__":
    main()
