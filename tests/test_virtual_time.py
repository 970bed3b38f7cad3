"""A clock that jumps: the order of things is kept, and waiting takes no time."""

from __future__ import annotations

import asyncio
import time

import pytest
from virtual_time import run_in_virtual_time


def test_an_hour_passes_at_once_and_in_order() -> None:
    async def play() -> tuple[list[str], float]:
        words: list[str] = []

        async def say(word: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            words.append(word)

        await asyncio.gather(say("late", 3600.0), say("early", 0.5), say("later", 3600.5))
        return words, asyncio.get_running_loop().time()

    began = time.monotonic()
    words, seconds = run_in_virtual_time(play())
    assert words == ["early", "late", "later"]
    assert seconds == pytest.approx(3600.5)
    assert time.monotonic() - began < 600


def test_a_time_out_ends_what_would_never_end() -> None:
    async def play() -> None:
        async with asyncio.timeout(1e6):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_in_virtual_time(play())


def test_a_thread_is_heard() -> None:
    async def play() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert run_in_virtual_time(play()) == 7
