"""Lets a few episodes through in each pass of the event loop, however many became ready at once."""

from __future__ import annotations

import asyncio

__all__ = ["Turnstile"]

WIDTH = 16
"""Episodes that one pass of the event loop goes on with; each takes a fraction of a millisecond."""


class Turnstile:
    """What is behind `passed` is work on the event loop: a prompt to render, a reply to parse.

    Thousands of replies that come together would be worked on in one pass, and nothing else would move meanwhile:
    no request would be sent, no time-out noticed.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._gate = asyncio.Semaphore(width)

    async def passed(self) -> None:
        """Waits for its turn."""
        async with self._gate:
            await asyncio.sleep(0)
