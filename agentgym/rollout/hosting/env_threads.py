"""Threads for environments: cheap hand-offs from the event loop; hung threads are abandoned.

A call goes to the thread's queue. Its outcome returns through one mailbox per event loop, which wakes the loop once for
all waiting outcomes. A thread whose environment hangs is abandoned: it is a daemon, it ends as soon as the call
returns, and until then it counts as leaked.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from agentgym.errors import AgentGymError
from agentgym.rollout.hosting.env_code import CallOutcome, attempt
from agentgym.tools.calling.worker_thread import WorkerThread

__all__ = ["EnvThread", "EnvThreads", "Mailbox", "ThreadCall"]

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """One call in another thread: await `future` on the loop that made it."""

    __slots__ = ("_mailbox", "function", "future", "started_at")

    def __init__(self, function: Callable[[], T], mailbox: Mailbox) -> None:
        self.function = function
        self.future: asyncio.Future[CallOutcome[T]] = mailbox.loop.create_future()
        self.started_at: float | None = None  # time.monotonic() when it began to run; written by the other thread
        self._mailbox = mailbox

    def run(self) -> None:
        """Runs the call in the other thread, and posts the outcome."""
        self.started_at = time.monotonic()
        self.finish(attempt(self.function))

    def finish(self, outcome: CallOutcome[T]) -> None:
        """Posts an outcome; callable from any thread."""
        self._mailbox.post(self.future, outcome)


class Mailbox:
    """Outcomes on their way to one event loop; the loop is woken once for all that wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[asyncio.Future[CallOutcome[object]], CallOutcome[object]]] = deque()
        self._woken = False

    def post(self, future: asyncio.Future[CallOutcome[T]], outcome: CallOutcome[T]) -> None:
        """Hands an outcome over, from any thread; dropped if the loop is gone."""
        self._waiting.append((future, outcome))  # type: ignore[arg-type]
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has closed: an abandoned call came back too late
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the first check: an outcome after it wakes the loop again
        while self._waiting:
            future, outcome = self._waiting.popleft()
            if not future.done():
                future.set_result(outcome)


class ThreadAbandoned(AgentGymError, RuntimeError):
    """A call that was queued on a thread, which then hung in another environment."""


class EnvThread(WorkerThread):
    """One daemon thread that runs calls of environments in the order they were submitted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.num_environments = 0
        self.abandoned = False

    def submit(self, function: Callable[[], T], mailbox: Mailbox) -> ThreadCall[T]:
        """Queues a call; on an abandoned thread it fails at once."""
        call = ThreadCall(function, mailbox)
        if self.abandoned:
            reason = "its thread is stuck in another environment that hangs; env_threads=None gives each its own"
            call.finish((ThreadAbandoned(reason), None))
        else:
            self.put(call.run)
        return call


class EnvThreads:
    """A pool of environment threads: one per live environment, or environments pinned to `num_threads`.

    Idle threads are kept for the next environment and end with the pool.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads
        self._idle: list[EnvThread] = []
        self._pinned: list[EnvThread] = []
        self._leaked: list[EnvThread] = []
        self._num_made = 0
        self._finalizer = weakref.finalize(self, _stop_all, self._idle, self._pinned)

    @property
    def num_leaked(self) -> int:
        """The number of threads that still hang in an environment's call."""
        self._leaked = [thread for thread in self._leaked if thread.alive]
        return len(self._leaked)

    def acquire(self) -> EnvThread:
        """Returns a thread for one more environment."""
        if self.num_threads is None:
            thread = self._idle.pop() if self._idle else self._start()
        elif len(self._pinned) < self.num_threads:
            thread = self._start()
            self._pinned.append(thread)
        else:
            thread = min(self._pinned, key=lambda candidate: candidate.num_environments)
        thread.num_environments += 1
        return thread

    def release(self, thread: EnvThread) -> None:
        """Takes back a thread whose environment has closed."""
        thread.num_environments -= 1
        if self.num_threads is None and not thread.abandoned:
            self._idle.append(thread)

    def abandon(self, thread: EnvThread) -> None:
        """Abandons a thread whose environment hangs: it ends when the call returns, after what was queued."""
        if not thread.abandoned:
            thread.abandoned = True
            thread.stop()
            self._leaked.append(thread)
            if thread in self._pinned:
                self._pinned.remove(thread)
        self.release(thread)

    def close(self) -> None:
        """Ends the threads; those in a call end after it."""
        self._finalizer()

    def _start(self) -> EnvThread:
        self._num_made += 1
        return EnvThread(f"agentgym-env-{self._num_made}")


def _stop_all(*pools: list[EnvThread]) -> None:
    for pool in pools:
        for thread in pool:
            thread.stop()
        pool.clear()
