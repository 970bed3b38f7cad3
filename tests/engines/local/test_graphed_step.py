"""The step of a GPU gives the logits of the step of operators, whatever is decoded and read together."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.runners import make_runner
from agentgym.engines.local.step import StepRunner
from agentgym.engines.protocol import Sampling
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import published_views

pytestmark = pytest.mark.gpu

SIZES = {"vocab_size": 300, "width": 64, "num_layers": 3, "ffn_width": 96, "context_window": 4096, "rope_theta": 1e4}
Parts = list[tuple[int, int, int]]
"""The slot, first position and number of rows of each part of a step."""


def make_model(num_heads: int = 4, num_kv_heads: int = 2, head_width: int = 16, qk_norm: bool = True) -> Decoder:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_width": head_width, "qk_norm": qk_norm}
    return Decoder(DecoderConfig(family="qwen3", **SIZES, **heads)).initialize(0).cuda()


def rows_of(parts: Parts) -> Rows:
    decode = [part for part in parts if part[2] == 1]
    extends = tuple(part for part in parts if part[2] > 1)
    ordered = [*decode, *extends]
    slot_N = np.concatenate([np.full(size, slot) for slot, _, size in ordered])
    position_N = np.concatenate([np.arange(start, start + size) for _, start, size in ordered])
    return Rows(slot_N, position_N, len(decode), extends, np.cumsum([size for *_, size in ordered]) - 1)


STEPS: list[Parts] = [
    [(0, 0, 700), (1, 0, 40), (3, 0, 5)],
    [(0, 700, 1), (1, 40, 1), (2, 0, 33), (3, 5, 2)],
    [(0, 701, 1), (1, 41, 1), (2, 33, 1), (3, 7, 1)],
    [(0, 702, 1)],
    [(1, 42, 1), (3, 8, 1), (2, 34, 3000)],
    [(2, 3034, 1), (4, 0, 9)],
    [(2, 3035, 1), (4, 9, 1)],
]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads",
    [
        {},
        {"qk_norm": False},
        {"num_kv_heads": 4},
        {"num_heads": 6, "head_width": 24},
        {"num_heads": 8, "num_kv_heads": 1},
    ],
)
def test_logits_are_those_of_the_step_of_operators(heads: dict[str, Any], dtype: torch.dtype) -> None:
    model = make_model(**heads).to(dtype)
    random = np.random.default_rng(0)
    tokens_SW = random.integers(300, size=(6, 4096))
    logits = []
    for name in ("graphed", "plain"):
        cache = SlotCache(model, 6, 4096)
        cache.tokens_SW[:] = tokens_SW
        step: Any = make_runner(model, cache)
        assert type(step).__name__ == "GraphedStep"
        if name == "plain":
            step = StepRunner(model, cache)
            step._attends_compiled = False
        logits.append([step.forward(rows_of(parts)).clone() for parts in [*STEPS, *STEPS]])
    for graph_RV, plain_RV in zip(*logits, strict=True):
        bound = 1e-4 if dtype == torch.float32 else 0.02
        assert (graph_RV - plain_RV).norm() < bound * plain_RV.norm()


def test_new_weights_and_released_memory_are_seen_by_the_graphs() -> None:
    model, weights = make_model(), make_model().state_dict()
    sampling = Sampling(max_tokens=20, temperature=0.0, seed=0)

    async def play() -> list[Any]:
        engine = LocalEngine(model, LocalEngineConfig(num_slots=4, window=256))
        replies = [await engine.generate([5, 6, 7], sampling, session="a")]
        await engine.pause()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        await engine.update_weights({}, 1)
        await engine.resume()
        replies.append(await engine.generate([5, 6, 7], sampling, session="b"))
        await engine.pause()
        await engine.release_memory()
        original = make_model()
        original.load_state_dict(weights)
        await engine.update_weights(dict(published_views(original)), 2)
        await engine.resume()
        replies.append(await engine.generate([5, 6, 7], sampling, session="c"))
        await engine.close()
        return replies

    first, changed, restored = asyncio.run(play())
    assert first.ids != changed.ids
    assert first.ids == restored.ids
    np.testing.assert_allclose(first.logprobs, restored.logprobs, atol=1e-4)
