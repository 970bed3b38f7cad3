"""The decoder's step of C++ computes what the uncompiled one does, and no row's bits depend on the others."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.runners import Runner, make_runner
from agentgym.engines.protocol import Sampling
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.trainers.config import TrainConfig

NUM_SLOTS, WINDOW = 40, 320


def config(family: str) -> DecoderConfig:
    shape = {
        "vocab_size": 90,
        "width": 48,
        "num_layers": 2,
        "head_width": 16,
        "ffn_width": 80,
        "context_window": WINDOW,
    }
    qwen3 = family == "qwen3"
    heads = {"num_heads": 4, "num_kv_heads": 2} if qwen3 else {"num_heads": 2, "num_kv_heads": 2}
    yarn = (("factor", 4.0), ("original_max_position_embeddings", 80), ("rope_type", "yarn"))  # cos and sin scaled too
    scaling = () if qwen3 else yarn
    bias = family == "qwen2"
    return DecoderConfig(
        family=family, tied=qwen3, qk_norm=qwen3, qkv_bias=bias, rope_scaling=scaling, **shape, **heads
    )


Pair = tuple[Runner, Runner]


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3", "qwen2")],
)
def steps(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same model and tokens, by the function of C++ and by operators of torch, each with a cache of its own."""
    torch.manual_seed(0)
    model = Decoder(config(request.param))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3 if parameter.ndim == 1 else 0.0, 0.2)
    caches = [SlotCache(model, NUM_SLOTS, WINDOW) for _ in range(2)]
    tokens_SW = np.random.default_rng(0).integers(90, size=(NUM_SLOTS, WINDOW))
    for cache in caches:
        cache.tokens_SW[:] = tokens_SW
    plain = make_runner(model, caches[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX")
        compiled = make_runner(model, caches[0], compiles=True)
    assert type(compiled) is not type(plain)
    yield compiled, plain


def prompts(lengths: dict[int, int]) -> Rows:
    """Each slot reads its first so many tokens; the last of each is wanted."""
    extends = tuple((slot, 0, length) for slot, length in lengths.items())
    slot_N = np.concatenate([np.full(length, slot) for slot, length in lengths.items()])
    position_N = np.concatenate([np.arange(length) for length in lengths.values()])
    return Rows(slot_N, position_N, 0, extends, np.cumsum(list(lengths.values())) - 1)


def decodes(positions: dict[int, int]) -> Rows:
    slot_N, position_N = np.array(list(positions)), np.array(list(positions.values()))
    return Rows(slot_N, position_N, len(slot_N), (), np.arange(len(slot_N)))


@torch.inference_mode()
def test_compiled_logits_equal_uncompiled_ones_at_any_length(steps: Pair) -> None:
    lengths = {0: 1, 3: 200, 4: 17, 7: 64, 9: 65, 30: 130}
    after = dict(lengths.items())
    for rows in (prompts(lengths), decodes(after), decodes({3: 201}), decodes(dict.fromkeys(range(NUM_SLOTS), 5))):
        fast_RV, plain_RV = (step.forward(rows) for step in steps)
        assert fast_RV.shape == plain_RV.shape == (len(rows.output_R), 90)
        torch.testing.assert_close(fast_RV, plain_RV, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_step_may_have_no_wanted_row(steps: Pair) -> None:
    rows = replace(prompts({0: 8}), output_R=np.array([], np.int64))
    assert steps[0].forward(rows).shape == (0, 90)


@torch.inference_mode()
def test_a_row_keeps_its_bits_among_long_and_short_prompts(steps: Pair) -> None:
    step = steps[0]
    lengths = dict.fromkeys(range(30), 20) | dict.fromkeys(range(30, NUM_SLOTS), 300)
    together_RV = step.forward(prompts(lengths))  # 3,600 rows
    for index, (slot, length) in enumerate(lengths.items()):
        alone_1V = step.forward(prompts({slot: length}))
        assert torch.equal(alone_1V[0], together_RV[index]), f"slot {slot}"


@torch.inference_mode()
def test_weights_that_change_in_place_are_used_at_once(steps: Pair) -> None:
    rows = prompts({2: 40})
    before_1V = steps[0].forward(rows)
    model = steps[0].model
    model.head_weight.mul_(0.5)
    model.blocks[1].get_parameter("down").mul_(-1.0)
    compiled_1V, plain_1V = (step.forward(rows) for step in steps)
    assert not torch.allclose(compiled_1V, before_1V, rtol=1e-2)
    torch.testing.assert_close(compiled_1V, plain_1V, rtol=1e-4, atol=1e-4)


def test_training_wants_its_small_model_compiled_where_a_compiler_is_found(
    small_run: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    engine = LocalEngine(Decoder(config("llama")).initialize(0), LocalEngineConfig(**asdict(small_run.local)))
    assert engine.compiles
    asyncio.run(engine.close())


@pytest.mark.slow
def test_training_compiles_before_its_first_episode(
    small_run: TrainConfig,
    train: Callable[..., tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    _, watcher = train(replace(small_run, steps=1, tasks=1, group_size=2), tmp_path)
    assert watcher.phases[:2] == ["model embedded", "compile"]


def test_without_a_compiler_the_engine_warns_and_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert cpp_compiler() is None
    model = Decoder(config("llama")).initialize(0)

    async def play() -> tuple[int, ...]:
        engine = LocalEngine(model, LocalEngineConfig())  # needs no warning
        reply = await engine.generate([1, 2, 3], Sampling(max_tokens=3), session="a")
        await engine.close()
        return reply.ids

    with caplog.at_level(logging.WARNING, "agentgym"):
        assert len(asyncio.run(play())) == 3
    assert caplog.records == []


BROKEN = """
import asyncio
from agentgym.embedded import embedded_folder
from agentgym.engines.local.engine import LocalEngine
from agentgym.model.model_folder import load_decoder
from agentgym.engines.protocol import Sampling

async def play():
    engine = LocalEngine(load_decoder(embedded_folder()))
    print(len((await engine.generate([5, 6, 7], Sampling(max_tokens=3), session="a")).ids))
    await engine.close()

asyncio.run(play())
"""


@pytest.mark.slow
def test_a_compiler_that_fails_is_warned_of(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    command, env = [sys.executable, "-c", BROKEN], os.environ | {"CXX": str(compiler)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "could not be compiled and runs uncompiled, slower: " in done.stderr
    assert "broken-compiler could not compile decoder_step.cpp" in done.stderr
