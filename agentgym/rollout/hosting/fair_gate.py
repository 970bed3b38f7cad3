"""Admits a few episodes to each pass of the event loop, however many became ready at once."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turnstile"]

WIDTH = 16
"""The number of episodes that one pass of the event loop continues; each takes a fraction of a millisecond."""


class Turnstile:
    """The gate to work on the event loop, such as rendering a prompt or parsing a reply; see `wait_turn`.

    Without it, thousands of replies that arrive together would be processed in one pass. Nothing else would run
    meanwhile: no request would be sent, no time-out noticed.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Waits until the event loop has room for this episode."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._admit, loop)
        self._waiting.append(turn)
        await turn

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Admits as many episodes as a pass continues, and the next ones in the next pass."""
        num_admitted = 0
        while self._waiting and num_admitted < self._width:
            turn = self._waiting.popleft()
            if not turn.done():  # else its episode was cancelled meanwhile
                turn.set_result(None)
                num_admitted += 1
        if self._waiting:
            loop.call_soon(self._admit, loop)
