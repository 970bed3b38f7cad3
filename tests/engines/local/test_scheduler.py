"""The scheduler and its slots: which prefixes requests share, and what finding them costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.scheduler import SamplingRequest, Scheduler
from agentgym.engines.protocol import Sampling
from agentgym.model.decoder import Decoder, DecoderConfig

WINDOW = 2_048


def slots(number: int, window: int = WINDOW) -> SlotCache:
    sizes = {"vocab_size": 10, "width": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_width": 8}
    model = Decoder(DecoderConfig(family="llama", ffn_width=8, context_window=window, **sizes))
    return SlotCache(model, number, window)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    event_loop = asyncio.new_event_loop()
    yield event_loop
    event_loop.close()


def test_a_token_in_each_of_many_long_slots_takes_little_memory() -> None:
    cache = slots(64, 1 << 17)  # 4 MiB of keys in a slot
    before = psutil.Process().memory_info().rss
    cache.kv[0][:, :, :, 0] = 1.0
    assert psutil.Process().memory_info().rss - before < 8 << 20, "two large pages for each would be 256 MiB"


def play(scheduler: Scheduler) -> int:
    """Commits steps until every request has begun; returns their number."""
    steps = 0
    while not steps or any(request.fresh for request in scheduler.active.values()):
        rows = scheduler.plan()
        number = len(rows.output_R)
        scheduler.commit(rows, np.zeros(number, np.int64), np.zeros(number, np.float32), 0)
        steps += 1
    return steps


def test_common_prefixes_are_those_of_a_comparison_token_by_token() -> None:
    random = np.random.default_rng(0)
    cache = slots(12)
    for slot in range(12):
        cache.load(slot, random.integers(2, size=random.integers(1, 12)))  # two words, so that much is shared
    for _ in range(40):
        some = random.permutation(12)[:5]
        cache.append(some, random.integers(2, size=5))
        for slot in range(12):
            expected = []
            for neighbour in range(12):
                least = min(cache.num_known_S[slot], cache.num_known_S[neighbour])
                differs = np.flatnonzero(cache.tokens_SW[slot, :least] != cache.tokens_SW[neighbour, :least])
                expected.append(0 if neighbour == slot else int(differs[0]) if differs.size else int(least))
            for at_least in range(1, int(cache.num_known_S[slot]) + 1):
                long_prefixes = [number if number >= at_least else 0 for number in expected]
                assert cache.common_prefix_S(slot, at_least).tolist() == long_prefixes
    cache.load(3, np.array([7, 7, 7]))  # a slot whose tokens are replaced
    assert not cache.common_prefix_S(3, 1).any()


def test_members_that_wait_for_a_prefix_look_for_it_once(
    monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop
) -> None:
    cache = slots(32)
    scheduler = Scheduler(cache, max_step_tokens=64, keep_idle_s=0.5)
    prompt_T = np.random.default_rng(0).integers(10, size=1_500)
    for member in range(32):
        future = loop.create_future()
        scheduler.add(SamplingRequest(prompt_T, Sampling(max_tokens=400), str(member), future, loop))
    looked: list[int] = []
    right = cache.common_prefix_S
    monkeypatch.setattr(cache, "common_prefix_S", lambda slot, worth: looked.append(slot) or right(slot, worth))
    scheduler.admit()
    assert play(scheduler) >= 1_500 // 64
    assert len(looked) <= 2 * 32  # when it comes, and when the prefix is there
    assert (cache.num_valid_S >= len(prompt_T) - 1).all()


def test_a_request_goes_on_by_itself_if_the_one_that_it_waits_for_is_aborted(loop: asyncio.AbstractEventLoop) -> None:
    cache = slots(2)
    scheduler = Scheduler(cache, max_step_tokens=64, keep_idle_s=0.5)
    prompt_T = np.random.default_rng(0).integers(10, size=1_000)
    requests = [
        SamplingRequest(prompt_T, Sampling(max_tokens=4), str(member), loop.create_future(), loop) for member in (0, 1)
    ]
    for request in requests:
        scheduler.add(request)
    scheduler.admit()
    for _ in range(3):
        rows = scheduler.plan()
        scheduler.commit(rows, np.zeros(0, np.int64), np.zeros(0, np.float32), 0)
    assert [request.fresh for request in requests] == [False, True]
    scheduler.end(requests[0])
    play(scheduler)
    assert cache.num_valid_S[requests[1].slot] >= 3 * 64


def test_tokens_with_the_same_hash_are_not_taken_for_the_same(
    monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop
) -> None:
    cache = slots(2)
    cache._factor_W[:] = 0  # all hashes are equal
    scheduler = Scheduler(cache, max_step_tokens=512, keep_idle_s=0.5)
    copies: list[tuple[int, ...]] = []
    monkeypatch.setattr(cache, "copy_prefix", lambda *arguments: copies.append(arguments))
    for member in range(2):
        prompt_T = np.full(100, member)
        request = SamplingRequest(prompt_T, Sampling(max_tokens=50), str(member), loop.create_future(), loop)
        scheduler.add(request)
    scheduler.admit()
    play(scheduler)
    assert not copies
