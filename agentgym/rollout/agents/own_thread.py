"""Runs a function on a thread of its own, for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from agentgym.errors import CODE_ERRORS

__all__ = ["start_thread"]

T = TypeVar("T")


def start_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Returns the future result of `function`, which runs on a new thread.

    The thread is none of a pool: those are few, and Python waits for them before it exits.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(set_result: Callable[[], None]) -> None:
        if not future.done():
            set_result()

    def run() -> None:
        try:
            result = function()
        except CODE_ERRORS as error:
            # StopIteration, Ctrl-C and their like would end the loop.
            raised = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            set_result = lambda: future.set_exception(raised)  # noqa: E731
        else:
            set_result = lambda: future.set_result(result)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, set_result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
