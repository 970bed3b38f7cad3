"""Runs a coroutine to its end: from plain code, inside a running event loop, or despite a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

__all__ = ["LoopRunner", "finish_uninterrupted", "loop_runner", "run_async"]

T = TypeVar("T")


class LoopRunner(Protocol):
    """Runs a coroutine in a new event loop, as `asyncio.run` does."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T:
        """Returns the coroutine's result."""


def loop_runner() -> LoopRunner:
    """Returns `asyncio.run`; in a thread whose event loop runs, a function that does the same in another thread."""
    if _is_inside_a_loop():
        return _run_in_thread
    return asyncio.run


def run_async(work: Coroutine[object, object, T]) -> T:
    """Returns the coroutine's result, whether or not an event loop runs in this thread."""
    return loop_runner()(work)


def _run_in_thread(work: Coroutine[object, object, T]) -> T:
    with ThreadPoolExecutor(1, "agentgym-loop") as pool:
        return pool.submit(asyncio.run, work).result()


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
