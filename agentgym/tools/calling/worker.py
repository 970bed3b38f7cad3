"""A thread that keeps the calls of an owner's sync code together, and a loop for coroutines of sync callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, TypeVar

from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.tools.calling.worker_thread import WorkerThread

__all__ = ["AROUND_CALLS", "Worker", "run_sync"]

T = TypeVar("T")
Around: TypeAlias = Callable[[], AbstractContextManager[None]]
AROUND_CALLS: ContextVar[Around] = ContextVar("AROUND_CALLS", default=nullcontext)
"""Makes the context manager that a call runs in on a worker's thread; read when the call is submitted."""


class Worker:
    """One daemon thread, started at the first call, that runs calls one after the other: always the same thread.

    A call that never returns cannot be stopped; `stop` abandons its thread, and the next call starts another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: WorkerThread | None = None
        self._lock = threading.Lock()

    def submit(self, fn: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Runs `fn` after the calls before it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._thread is None:
                self._thread = WorkerThread(self._name)
            self._thread.put(partial(_run, fn, future, AROUND_CALLS.get()))
        return future

    async def run(self, fn: Callable[[], T]) -> T:
        """Submits `fn` and awaits it; if the wait is cancelled while `fn` runs, its thread is abandoned."""
        future = self.submit(fn)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running() or not future.cancelled():
                self.stop()
            raise

    def run_sync(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Calls `run_sync`; on this worker's own thread, its calls go on meanwhile, so the coroutine may await them."""
        thread = self._thread
        if thread is None or not thread.is_current:
            return run_sync(coroutine)
        awaited = _background.submit(coroutine)
        awaited.add_done_callback(lambda _: thread.put(_nothing))
        thread.serve_until(awaited.done)
        return awaited.result()

    async def run_within(self, fn: Callable[[], object], timeout_s: float) -> None:
        """Runs `fn` and waits `timeout_s` at most; a thread that has not finished by then is abandoned."""
        future = asyncio.wrap_future(self.submit(fn))
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if done:
            future.result()
        else:
            self.stop()

    def stop(self) -> None:
        """Ends the thread after the calls already submitted, or abandons it in one that hangs.

        A later call starts a new thread.
        """
        with self._lock:
            if self._thread is not None:
                self._thread.stop()
                self._thread = None

    def __reduce__(self) -> tuple[object, ...]:  # a copy starts a thread of its own
        return (Worker, (self._name,))


def _run(fn: Callable[[], Any], future: concurrent.futures.Future[Any], around: Around) -> None:
    if future.set_running_or_notify_cancel():
        with around():
            _resolve(fn, future)


def _nothing() -> None:
    """A call that wakes a worker."""


def _resolve(fn: Callable[[], Any], future: concurrent.futures.Future[Any]) -> None:
    try:
        result = fn()
    except BaseException as error:  # noqa: BLE001  # handed to the waiter, as a thread pool does
        future.set_exception(error)
    else:
        future.set_result(result)


_background = BackgroundLoop("agentgym-loop")


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the coroutine's result to a caller that is not async, whether or not a loop runs on its thread.

    It runs on one background loop, always the same, so that objects tied to a loop stay valid between calls.
    """
    if _background.is_current:  # called by a coroutine of that loop: it cannot wait for itself
        box: concurrent.futures.Future[T] = concurrent.futures.Future()
        threading.Thread(target=lambda: _resolve(lambda: asyncio.run(coroutine), box), daemon=True).start()
        return box.result()
    future = _background.submit(coroutine)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
