"""Rate limits keep what is sent within its budget, in order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.engines.openai.rate_limit import RateLimit


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def starts_of(requests: float | None, tokens: float | None, sizes: list[int]) -> list[float]:
    """When requests of these sizes pass, all asked for at once."""
    time, starts = Time(), []

    async def main() -> None:
        limit = RateLimit(requests, tokens, clock=lambda: time.now, sleep=time.sleep)

        async def one(size: int) -> None:
            await limit.acquire(size)
            starts.append(time.now)

        await asyncio.gather(*map(one, sizes))

    asyncio.run(main())
    return [start - 100.0 for start in starts]


@settings(max_examples=40)
@given(st.integers(1, 600), st.integers(1, 150))
def test_no_minute_sees_more_requests_than_61_seconds_bring(per_minute: int, count: int) -> None:
    starts = starts_of(per_minute, None, [0] * count)
    assert starts == sorted(starts)
    for start in starts:
        within = sum(start <= later < start + 60 - 1e-6 for later in starts)
        assert within <= per_minute * 61 / 60 + 1


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_tokens_pass_at_their_rate_whatever_the_size_of_a_request(sizes: list[int]) -> None:
    starts = starts_of(None, 6000, sizes)  # a hundred in a second
    assert starts[-1] >= (sum(sizes[:-1]) - 100) / 100 - 1e-6
    assert starts[-1] <= sum(sizes) / 100 + 1e-6


def test_without_limits_nothing_waits() -> None:
    assert starts_of(None, None, [10_000] * 5) == [0.0] * 5


def test_an_estimate_is_settled_and_a_hold_holds_everybody() -> None:
    time = Time()

    async def main() -> None:
        limit = RateLimit(None, 6000, clock=lambda: time.now, sleep=time.sleep)
        await limit.acquire(1000)
        limit.settle(1000, 50)
        await limit.acquire(100)
        assert time.now == pytest.approx(100.5)
        limit.hold(30)
        await limit.acquire(0)
        assert time.now == pytest.approx(130.5)

    asyncio.run(main())
