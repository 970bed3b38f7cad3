"""Compares small models of many architectures on the device with the CPU: logprobs, gradients and sampled replies."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch
from probe_case import Probe
from torch import Tensor

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Sampling
from agentgym.model.language_model import LanguageModel
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.trainers.model_check.small_models import save_small_model

KINDS = (
    *("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "cohere2", "granite", "olmo2", "gpt_oss"),
    *("qwen3_moe", "mixtral", "deepseek_v3", "llama4_text", "glm4_moe", "qwen3_next", "qwen3_5_text"),
)


def read(model: LanguageModel, rows: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the logprobs of the next tokens in packed rows, and the gradient of their mean by the embedding."""
    model = model.to(dtype)
    device = model.embed.device
    ids_N = torch.cat(rows)
    layout = PackedLayout([len(row) for row in rows], device, ids_N=ids_N)
    model.requires_grad_()
    states_NE = model.hidden_states(ids_N.to(device), layout)
    logp_NV = model.logits(states_NE).float().log_softmax(-1)
    logp_N = logp_NV.gather(1, ids_N.roll(-1).to(device)[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logp_N.mean(), model.embed)
    return logp_N.detach().cpu(), gradient.float().cpu()


def compare(probe: Probe, kind: str, backend: Any) -> dict[str, Any]:
    """Returns the largest differences from the CPU in float32, and those of bfloat16 and of the engine's logprobs."""
    with tempfile.TemporaryDirectory() as folder:
        save_small_model(kind, Path(folder))
        here, there = (load_policy(folder, backend=backend) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    shared_T = torch.randint(3, here.vocab_size, (40,), generator=generator)
    rows = [torch.cat([shared_T, torch.randint(3, here.vocab_size, (size,), generator=generator)]) for size in (17, 30)]
    there = there.to(probe.device)
    reference_N, own_gradient = read(here, rows, torch.float32)
    device_N, gradient = read(there, rows, torch.float32)
    report: dict[str, Any] = {
        "logprob": float((device_N - reference_N).abs().max()),
        "gradient": float((gradient - own_gradient).abs().max() / own_gradient.abs().max()),
    }

    async def play() -> list[Any]:
        engine = LocalEngine(there, LocalEngineConfig(num_slots=4, window=128))
        sampling = Sampling(max_tokens=12, temperature=1.0, seed=0)
        jobs = (engine.generate(row.tolist(), sampling, session=str(number)) for number, row in enumerate(rows))
        replies = await asyncio.gather(*jobs)
        await engine.close()
        return list(replies)

    replies = asyncio.run(play())
    whole = [torch.tensor([*row.tolist(), *reply.ids]) for row, reply in zip(rows, replies, strict=True)]
    logp_N = read(there, whole, torch.float32)[0]
    ends = torch.tensor([len(row) for row in whole]).cumsum(0).tolist()
    learner_N = torch.cat([logp_N[end - 13 : end - 1] for end in ends])
    report["engine"] = float(
        (learner_N - torch.tensor([logp for reply in replies for logp in reply.logprobs])).abs().max()
    )
    report["bfloat16"] = float((read(there, rows, torch.bfloat16)[0] - reference_N).abs().mean())
    return report


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    for kind in KINDS:
        probe.case("architecture", lambda kind=kind: compare(probe, kind, "transformers"), kind=kind)
    probe.case("architecture", lambda: compare(probe, "qwen3", "fast"), kind="qwen3, fast decoder")


if __name__ == "__main__":
    main()
