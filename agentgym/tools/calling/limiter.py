"""Bounds how many calls of one tool run at once and begin in a second, over all loops and threads of the process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import weakref
from collections import deque

__all__ = ["Limiter", "limiter_for"]


class Limiter:
    """An async context manager that lets `limit` holders in; None is no limit. First come, first served.

    With `per_s` they enter one after the other, 1 / `per_s` seconds apart by the clock of their loops.
    """

    def __init__(self, limit: int | None, per_s: float | None = None) -> None:
        self._free = limit
        self._apart_s = 0.0 if per_s is None else 1.0 / per_s
        self._next_s = -math.inf
        self._waiting: deque[concurrent.futures.Future[None]] = deque()
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        await self._enter()
        if not self._apart_s:
            return
        now_s = asyncio.get_running_loop().time()
        with self._lock:
            begin_s = max(now_s, self._next_s)
            self._next_s = begin_s + self._apart_s
        if begin_s > now_s:
            try:
                await asyncio.sleep(begin_s - now_s)
            except asyncio.CancelledError:
                await self.__aexit__()
                raise

    async def _enter(self) -> None:
        if self._free is None:
            return
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            ticket: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._waiting.append(ticket)
        try:
            await asyncio.wrap_future(ticket)
        except asyncio.CancelledError:
            if not ticket.cancelled():  # the slot was handed over just as the wait was cancelled
                await self.__aexit__()
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        if self._free is None:
            return
        with self._lock:
            while self._waiting:
                if self._waiting[0].set_running_or_notify_cancel():
                    self._waiting.popleft().set_result(None)
                    return
                self._waiting.popleft()
            self._free += 1


_UNLIMITED = Limiter(None)
_limiters: weakref.WeakKeyDictionary[object, Limiter] = weakref.WeakKeyDictionary()
_limiters_lock = threading.Lock()


def limiter_for(fn: object, limit: int | None, per_s: float | None = None) -> Limiter:
    """Returns the limiter for all calls of the function `fn` (of a bound method: of its function)."""
    if limit is None and per_s is None:
        return _UNLIMITED
    key = getattr(fn, "__func__", fn)
    with _limiters_lock:
        return _limiters.setdefault(key, Limiter(limit, per_s))
