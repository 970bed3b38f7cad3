"""A step that several threads compute gives the bits of one, and a part that fails fails the step."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config  # before the tests hide the compiler
from hypothesis import given
from hypothesis import strategies as st

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.split_step import MIN_PART_ROWS, SplitStep, split_rows
from agentgym.engines.protocol import Completion, Sampling
from agentgym.model.decoder import Decoder, DecoderConfig


def step_of(num_decode: int, extend_sizes: list[int]) -> Rows:
    """A step in which every decoding slot and every second prompt is sampled from."""
    slots = range(num_decode, num_decode + len(extend_sizes))
    slot_N = np.concatenate([np.arange(num_decode), *(np.full(n, s) for s, n in zip(slots, extend_sizes, strict=True))])
    position_N = np.concatenate([np.full(num_decode, 7), *map(np.arange, extend_sizes)])
    last = num_decode + np.cumsum(extend_sizes)[::2].astype(np.int64) - 1
    extends = tuple((slot, 0, size) for slot, size in zip(slots, extend_sizes, strict=True))
    return Rows(
        slot_N.astype(np.int64),
        position_N.astype(np.int64),
        num_decode,
        extends,
        np.append(range(num_decode), last).astype(np.int64),
    )


@given(st.integers(0, 60), st.lists(st.integers(2, 90), max_size=8), st.integers(1, 5))
def test_the_parts_of_a_step_have_all_of_its_rows_once_and_each_slot_in_one(
    num_decode: int, extend_sizes: list[int], num_parts: int
) -> None:
    rows = step_of(num_decode, extend_sizes)
    parts = [part for _, part in split_rows(rows, num_parts)]
    assert len(parts) <= num_parts and all(len(part.slot_N) for part in parts)
    owners = [set(part.slot_N.tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)) == num_decode + len(extend_sizes)
    assert sum(len(part.slot_N) for part in parts) == len(rows.slot_N)
    for part in parts:
        sizes = [size for _, _, size in part.extends]
        assert part.num_decode + sum(sizes) == len(part.slot_N)
        assert np.array_equal(part.slot_N[part.num_decode :], np.repeat([slot for slot, _, _ in part.extends], sizes))
    places = np.concatenate([places for places, _ in split_rows(rows, num_parts)] or [np.array([], np.int64)])
    wanted = [slot for _, part in split_rows(rows, num_parts) for slot in part.slot_N[part.wanted_R]]
    assert sorted(places) == list(range(len(rows.wanted_R)))
    assert np.array_equal(rows.slot_N[rows.wanted_R][places], wanted)


def test_parts_are_as_large_as_each_other_where_slots_allow_it() -> None:
    parts = split_rows(step_of(40, [60, 20]), 3)
    assert sorted(len(part.slot_N) for _, part in parts) == [30, 30, 60]


def decoder() -> Decoder:
    shape = {"vocab_size": 100, "width": 64, "num_layers": 2, "head_width": 16, "ffn_width": 96}
    return Decoder(DecoderConfig(family="qwen3", num_heads=4, num_kv_heads=2, context_window=256, **shape)).initialize(
        0
    )


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_number_of_threads_changes_no_reply(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    model, threads = decoder(), []
    forward = SplitStep._compute

    def compute(split: SplitStep, rows: Rows) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return forward(split, rows)

    monkeypatch.setattr(SplitStep, "_compute", compute)

    async def replies(num_threads: int) -> list[Completion]:
        engine = LocalEngine(model, LocalEngineConfig(threads=num_threads, compile=compiled))
        prompts = [[n, *range(n % 40 + 1)] for n in range(100)]
        asked = (
            engine.generate(prompt, Sampling(max_tokens=9, seed=n), session=str(n)) for n, prompt in enumerate(prompts)
        )
        sampled = await asyncio.gather(*asked)
        await engine.close()
        return list(sampled)

    alone = asyncio.run(replies(1))
    assert not threads
    assert asyncio.run(replies(2)) == alone
    num_parts = len(threads)
    assert asyncio.run(replies(3)) == alone
    assert len(threads) - num_parts > num_parts > 0, "two parts of a step, where there was one"
    assert threading.current_thread().name not in threads
    assert not [thread for thread in threading.enumerate() if thread.name in threads]


class Failing:
    """Computes zeros, but fails for a slot."""

    def __init__(self, bad_slot: int) -> None:
        self.bad_slot = bad_slot

    def forward(self, rows: Rows) -> torch.Tensor:
        if self.bad_slot in rows.slot_N:
            raise RuntimeError(f"slot {self.bad_slot} is bad")
        return torch.zeros(len(rows.wanted_R), 3)


@pytest.mark.parametrize("bad_slot", [0, 2 * MIN_PART_ROWS - 1])
def test_a_part_that_fails_fails_the_step_and_the_next_one_runs(bad_slot: int) -> None:
    runner: Any = Failing(bad_slot)
    split = SplitStep(runner, 2)
    rows = step_of(2 * MIN_PART_ROWS, [])
    with pytest.raises(RuntimeError, match=f"slot {bad_slot} is bad"):
        split.forward(rows)
    runner.bad_slot = -1
    assert split.forward(rows).shape == (len(rows.wanted_R), 3)
    split.close()
