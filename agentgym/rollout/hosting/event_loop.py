"""Runs a coroutine to its end: from plain code, inside a running event loop, or despite a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["finish_uninterrupted", "run_async"]

T = TypeVar("T")


def run_async(work: Coroutine[object, object, T]) -> T:
    """Returns the coroutine's result; in a thread whose event loop runs, a loop in another thread runs it meanwhile."""
    if not _is_inside_a_loop():
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "agentgym-loop") as aside:
        return aside.submit(asyncio.run, work).result()


async def finish_uninterrupted(work: Coroutine[object, object, None]) -> None:
    """Finishes `work` even when the waiting task is cancelled, and passes the cancellation on afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _is_inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
