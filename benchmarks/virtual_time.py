"""An event loop whose clock jumps: hours of waiting pass in the time that the work itself takes."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

__all__ = ["VirtualTimeLoop", "run_in_virtual_time"]

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that sets the clock to the next timer instead of waiting for it."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns what is ready; if only other threads' calls can come, waits for those as usual."""
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.now_s += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop where `sleep`, `timeout` and `call_later` keep their order and take no time; `time()` is virtual.

    It is for code that runs on the event loop alone: the clock does not wait for threads or sockets that deliver
    something later, such as an environment that is called on a thread.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns the virtual seconds since the loop was made."""
        return self._jumping.now_s


def run_in_virtual_time(work: Coroutine[object, object, T]) -> T:
    """Returns the coroutine's result, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
