"""Measures what `torch.compile` gives a learner's step, with everything of a layer but its attention compiled."""

from __future__ import annotations

import time
from typing import Any

import torch
from learning_cases import learn
from probe_case import Probe

from agentgym.model.decoder import DecoderLayer
from agentgym.trainers.learner import token_logprobs


def with_compiled(probe: Probe, **about: Any) -> dict[str, Any]:
    """Measures with `_project` and `_mix` of each layer compiled, for any number of tokens."""
    own = DecoderLayer._project, DecoderLayer._mix
    torch._dynamo.config.cache_size_limit = 64
    project, mix = (torch.compile(method, dynamic=True) for method in own)
    DecoderLayer._project, DecoderLayer._mix = project, mix  # type: ignore[method-assign]
    started = time.perf_counter()
    try:
        return learn(probe, **about) | {"with_compilation_s": round(time.perf_counter() - started, 1)}
    finally:
        DecoderLayer._project, DecoderLayer._mix = own  # type: ignore[method-assign]


def with_chunks(probe: Probe, num_logits: int, **about: Any) -> dict[str, Any]:
    """Measures with so many logits at once."""
    before, token_logprobs.GPU_CHUNK_LOGITS = token_logprobs.GPU_CHUNK_LOGITS, num_logits
    try:
        return learn(probe, **about)
    finally:
        token_logprobs.GPU_CHUNK_LOGITS = before


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    for kind in ("single", "long"):
        probe.case("learn", lambda kind=kind: learn(probe, kind), shape=probe.shape, kind=kind)
        for number in (64_000_000, 512_000_000):
            probe.case(
                "learn",
                lambda kind=kind, number=number: with_chunks(probe, number, kind=kind, kernels=number > 10**8),
                shape=probe.shape,
                kind=kind,
                logits=number,
            )
        about = {"kind": kind, "kernels": True}
        probe.case("learn, compiled", lambda about=about: with_compiled(probe, **about), shape=probe.shape, kind=kind)


if __name__ == "__main__":
    main()
