"""Time limits of one length for thousands of episodes, with one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import TracebackType

__all__ = ["Deadlines"]


class Deadlines:
    """Limits of `limit_s` seconds: `async with Deadlines(600).limit(): ...` ends as `asyncio.timeout(600)` does.

    With a timer each, the event loop would also sort the timers of live and of ended episodes: 3% more calls of
    functions for an episode (`benchmarks/simulate.py`). Limits of one length end in the order in which they begin, so
    one timer is enough.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def limit(self) -> _Limit:
        """Returns a limit that begins when it is entered."""
        return _Limit(self)

    def begin(self, timeout: asyncio.Timeout) -> None:
        """Schedules a timeout to end `limit_s` from now."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # timeouts of an earlier loop have ended with it
            self._loop, self._live, self._timer = loop, {}, None
        due = loop.time() + self.limit_s
        self._live[timeout] = due
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)

    def end(self, timeout: asyncio.Timeout) -> None:
        """Forgets a timeout that is over."""
        self._live.pop(timeout, None)

    def _look(self) -> None:
        """Ends the timeouts that are due, and schedules itself for the first one that is not."""
        assert self._loop is not None
        now, self._timer = self._loop.time(), None
        for timeout, due in list(self._due(now)):
            del self._live[timeout]
            timeout.reschedule(due)
        for due in self._live.values():
            self._timer = self._loop.call_at(due, self._look)
            break

    def _due(self, now: float) -> Iterator[tuple[asyncio.Timeout, float]]:
        for timeout, due in self._live.items():
            if due > now:
                return
            yield timeout, due


class _Limit:
    """One of these limits, as a context manager."""

    __slots__ = ("_deadlines", "_timeout")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._deadlines.begin(self._timeout)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._deadlines.end(self._timeout)
        await self._timeout.__aexit__(kind, error, frames)
