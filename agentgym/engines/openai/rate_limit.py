"""Limits on what is sent in a minute, applied before it is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

__all__ = ["RateLimit"]


class RateLimit:
    """Two token buckets, one of requests and one of tokens; None for either means no limit.

    A bucket holds one second's worth (a request at least), so that no minute has more than 61 seconds' worth. A request
    larger than the bucket passes when it is full and is paid back later. Requests pass in order of arrival.
    """

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._requests = _Bucket(requests_per_minute, 1.0, clock())
        self._tokens = _Bucket(tokens_per_minute, 1.0, clock())
        self._held_until = 0.0
        self._turn = asyncio.Lock()

    async def acquire(self, num_tokens: int) -> None:
        """Waits until a request of about `num_tokens` may be sent, and takes it from the buckets."""
        async with self._turn:
            while True:
                now = self._clock()
                wait_s = max(
                    self._held_until - now, self._requests.wait_s(1.0, now), self._tokens.wait_s(num_tokens, now)
                )
                if wait_s <= 0:
                    break
                await self._sleep(wait_s)
            self._requests.take(1.0)
            self._tokens.take(num_tokens)

    def settle(self, estimated_tokens: int, used_tokens: int) -> None:
        """Corrects the estimate of `acquire` when the answer reports what was used."""
        self._tokens.take(used_tokens - estimated_tokens)

    def hold(self, seconds: float) -> None:
        """Lets nothing pass for so many seconds, because the endpoint asked all clients to wait."""
        self._held_until = max(self._held_until, self._clock() + seconds)


class _Bucket:
    def __init__(self, per_minute: float | None, min_size: float, now: float) -> None:
        self._per_s = None if per_minute is None else per_minute / 60
        self._size = max(min_size, self._per_s or 0.0)
        self._level = self._size
        self._filled_at = now

    def wait_s(self, amount: float, now: float) -> float:
        if self._per_s is None:
            return 0.0
        self._level = min(self._size, self._level + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        lacking = min(amount, self._size) - self._level
        return lacking / self._per_s if lacking > 1e-9 else 0.0

    def take(self, amount: float) -> None:
        self._level -= amount
