"""The mismatch of a mixture of experts between the in-process engine and the learner, with and without router replay.

    python benchmarks/router_replay.py [--dtype bfloat16] [--experts 32] [--replies 32] [--tokens 96]

A random model of the shape of Qwen3-MoE samples replies to prompts of random ids. The learner's logprobs of the same
ids are computed twice: with its own choice of experts, and with the recorded ones. Prints a JSON object: the mean and
the largest difference in nats, the share of choices that differ, and the bytes that a token's experts take in a record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Completion, Sampling
from agentgym.model.model_class import auto_class
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.routing import BatchRouting
from agentgym.model.transformers_folder import load_transformers_model
from agentgym.model.transformers_model import TransformersModel

VOCAB_SIZE, NUM_PROMPT = 2048, 64


def make_model(folder: Path, num_experts: int, dtype: torch.dtype) -> TransformersModel:
    """Returns a random mixture of 8 layers, each token of which is given to 4 experts."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_experts=num_experts,
        num_experts_per_tok=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return load_transformers_model(folder, dtype=dtype).requires_grad_(False)


async def sample(model: TransformersModel, prompts: list[list[int]], num_tokens: int) -> list[Completion]:
    """Samples a reply to every prompt, all at once."""
    window = NUM_PROMPT + num_tokens
    engine = LocalEngine(model, LocalEngineConfig(num_slots=len(prompts), window=window, record_experts=True))
    try:
        calls = [
            engine.generate(prompt, Sampling(max_tokens=num_tokens, seed=number), session=str(number))
            for number, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)
    finally:
        await engine.close()


@torch.no_grad()
def learner_logprobs(model: TransformersModel, rows: list[Tensor], experts_NRK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the logprobs of all ids but each row's first, in one packed pass, and the experts that were chosen."""
    lengths, ids_N = [len(row) - 1 for row in rows], torch.cat([row[:-1] for row in rows])
    layout = PackedLayout(lengths, ids_N=ids_N)
    layout.routing = BatchRouting(lengths, experts_NRK)
    logits_NV = model.logits(model.hidden_states(ids_N, layout)).float().log_softmax(-1)
    return logits_NV.gather(1, torch.cat([row[1:] for row in rows])[:, None])[:, 0], layout.routing.chosen_NRK()


def main() -> None:
    """Samples, compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--replies", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB_SIZE, (options.replies, NUM_PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), options.experts, getattr(torch, options.dtype))
    replies = asyncio.run(sample(model, prompts, options.tokens))
    rows = [torch.tensor([*prompt, *reply.ids]) for prompt, reply in zip(prompts, replies, strict=True)]
    records = [reply.experts for reply in replies if reply.experts is not None]
    experts_NRK = torch.cat([torch.from_numpy(record.experts_TRK.copy()) for record in records])
    sampled_N = torch.cat([torch.tensor([0.0] * (NUM_PROMPT - 1) + list(reply.logprobs)) for reply in replies])
    is_sampled_N = torch.tensor(([False] * (NUM_PROMPT - 1) + [True] * options.tokens) * options.replies)
    stored = sum(len(json.dumps(record.to_json())) for record in records)
    report: dict[str, object] = {"dtype": options.dtype, "experts": options.experts, "sampled": int(is_sampled_N.sum())}
    report["bytes_per_token"] = round(stored / len(experts_NRK), 1)
    for name, replayed in (("own", None), ("replayed", experts_NRK)):
        logp_N, chosen_NRK = learner_logprobs(model, rows, replayed)
        gap_M = (logp_N - sampled_N).abs()[is_sampled_N]
        differs = chosen_NRK.sort(-1)[0] != experts_NRK.sort(-1)[0]
        report[name] = {
            "mean": float(f"{gap_M.mean():.2g}"),
            "max": float(f"{gap_M.max():.2g}"),
            "choices_that_differ": float(f"{differs.any(-1).float().mean():.2g}"),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
