"""Admits a few episodes to each pass of the event loop, however many became ready at once."""

from __future__ import annotations

import asyncio
from itertools import islice

__all__ = ["FairGate"]

WIDTH = 16
"""The number of episodes that one pass of the event loop continues; each takes a fraction of a millisecond."""


class FairGate:
    """The gate to work on the event loop, such as rendering a prompt or parsing a reply; see `wait_turn`.

    Without it, thousands of replies that arrive together would be processed in one pass. Nothing else would run
    meanwhile: no request would be sent, no time-out noticed.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait_turn(self) -> None:
        """Waits until the event loop has room for this episode."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._admit, loop)
        self._waiting[turn] = None
        try:
            await turn
        finally:
            self._waiting.pop(turn, None)  # it is still there if its episode was cancelled

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Admits as many episodes as a pass continues, and the next ones in the next pass."""
        for turn in list(islice(self._waiting, self._width)):
            del self._waiting[turn]
            if not turn.done():  # else its episode was cancelled
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._admit, loop)
