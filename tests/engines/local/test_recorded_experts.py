"""The in-process engine reports the experts that computed each token, over turns, prefixes and weight updates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from agentgym.engines.local import kv_cache
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kv_cache import fitting_slots
from agentgym.engines.protocol import Completion, Sampling
from agentgym.errors import ConfigError
from agentgym.model.model_folder import published_views
from agentgym.model.pass_attention import BatchAttention
from agentgym.model.routing import PassRouting, routing_of
from agentgym.model.transformers_folder import load_transformers_model
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.model_check.small_models import save_small_model

SETTINGS = LocalEngineConfig(num_slots=3, window=160, max_step_tokens=32, record_experts=True)


def load(name: str, folder: Path) -> TransformersModel:
    save_small_model(name, folder)
    return load_transformers_model(folder).requires_grad_(False)


@torch.no_grad()
def experts_of(model: TransformersModel, ids: list[int]) -> np.ndarray:
    """The experts of a pass over these ids alone, `[T, R, K]`."""
    routing, ids_1T = PassRouting(), torch.tensor([ids])
    with routing_of(routing):
        model.states(ids_1T, torch.arange(len(ids))[None], BatchAttention(1))
    return routing.chosen_PRK.numpy()


def test_the_record_counts_among_the_bytes_of_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, window, free = load("qwen3_moe", tmp_path), 4096, 1 << 40
    monkeypatch.setattr(kv_cache, "available_memory", lambda: free)
    plain, recorded = (1 + fitting_slots(model, window, 10**9, record_experts=records) for records in (False, True))
    record_bytes = window * len(model.routers) * model.num_chosen() * 2
    assert free // 2 / recorded - free // 2 / plain == pytest.approx(record_bytes, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_experts_are_those_of_a_pass_over_the_whole_row(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    prompts = [[7 + number % 2, *range(20, 60)] for number in range(4)]  # pairs, more than there are slots

    async def play() -> list[tuple[list[int], Completion]]:
        engine = LocalEngine(model, SETTINGS)
        pairs = []
        try:
            for turn in range(2):
                calls = [
                    engine.generate(prompt, Sampling(max_tokens=9, seed=number), session=str(number))
                    for number, prompt in enumerate(prompts)
                ]
                replies = await asyncio.gather(*calls)
                pairs += [(list(prompt), own) for prompt, own in zip(prompts, replies, strict=True)]
                for prompt, own in zip(prompts, replies, strict=True):
                    prompt += [*own.ids, 5, 6 + turn]
        finally:
            await engine.close()
        return pairs

    for prompt, own in asyncio.run(play()):
        assert own.experts is not None and own.experts.start == 0
        ids = [*prompt, *own.ids][:-1]
        assert np.array_equal(own.experts.experts_TRK, experts_of(model, ids))


def test_after_an_update_the_experts_are_those_of_the_new_weights(tmp_path: Path) -> None:
    model = load("qwen3_moe", tmp_path)
    prompt, sampling = list(range(20, 60)), Sampling(max_tokens=5, seed=1)
    changed = {name: tensor.flip(0).clone() for name, tensor in published_views(model)}

    async def play() -> tuple[Completion, Completion]:
        engine = LocalEngine(model, SETTINGS)
        try:
            first = await engine.generate(prompt, sampling, session="a")
            await engine.update_weights(changed, 1)
            return first, await engine.generate(prompt, sampling, session="a")
        finally:
            await engine.close()

    first, second = asyncio.run(play())
    assert first.experts is not None and second.experts is not None
    assert not np.array_equal(first.experts.experts_TRK[:40], second.experts.experts_TRK[:40])
    assert np.array_equal(second.experts.experts_TRK, experts_of(model, [*prompt, *second.ids][:-1]))


@pytest.mark.parametrize("name", ["gemma3_text", "phimoe"])
def test_a_model_without_such_routers_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_experts is for mixtures of experts whose routers choose by topk"):
        LocalEngine(load(name, tmp_path), SETTINGS)
