"""Admits a few episodes to each pass of the event loop, however many became ready at once."""

from __future__ import annotations

import asyncio

__all__ = ["Turnstile"]

WIDTH = 16
"""The number of episodes that one pass of the event loop continues; each takes a fraction of a millisecond."""


class Turnstile:
    """The gate to work on the event loop, such as rendering a prompt or parsing a reply; see `wait_turn`.

    Without it, thousands of replies that arrive together would be processed in one pass. Nothing else would run
    meanwhile: no request would be sent, no time-out noticed.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._gate = asyncio.Semaphore(width)

    async def wait_turn(self) -> None:
        """Waits until the event loop has room for this episode."""
        async with self._gate:
            await asyncio.sleep(0)
