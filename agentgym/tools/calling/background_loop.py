"""An event loop on its own thread, for objects that outlive their caller's loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["BackgroundLoop"]

T = TypeVar("T")


class BackgroundLoop:
    """Starts its daemon thread at the first use, and another one in a forked child, which does not inherit it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    @property
    def is_current(self) -> bool:
        """True if the caller is on the loop's thread, where it cannot wait for the loop."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs the coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self, wait_s: float | None = None) -> None:
        """Ends the loop and its thread, after waiting `wait_s` at most for a callback; the next use starts others."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(wait_s)
            loop.close()


_all: weakref.WeakSet[BackgroundLoop] = weakref.WeakSet()


def _begin_all() -> None:
    for background in _all:
        background._begin()


os.register_at_fork(after_in_child=_begin_all)
