"""Keeps Python's garbage collector from holding up thousands of episodes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["FullCollections", "young_garbage_only"]

NEVER = 1_000_000_000
"""The number of collections of younger objects between two of older ones."""
EVERY = 16
"""The least number of updates from one full collection to the next."""
PAUSE = 100
"""The pause after a full collection, as a multiple of its duration."""


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Lets the collector look at each new object only once inside the context; restores its settings afterwards.

    A full collection looks at every live object. With thousands of episodes those are millions: the event loop would
    stop for up to a second, again and again, and a fifth of the CPU would go there. The second look, at objects that
    lived through ten first ones, is useless too: an episode outlives it, and its objects have left the processor's
    caches by then. With 40,000 live episodes it takes a tenth of all CPU time.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], NEVER, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class FullCollections:
    """Runs full collections between updates, for a run that is under `young_garbage_only` from its begin to its end.

    Each looks at every object of every live episode, which takes four seconds with 100,000 of them. So one runs after
    16 updates at the earliest, and not before a hundred times the last one's duration.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_updates = 0
        self._not_before_s = 0.0

    def count_update(self) -> None:
        """Counts an update; collects if it is time to."""
        self._num_updates += 1
        started = self._clock()
        if self._num_updates < EVERY or started < self._not_before_s:
            return
        gc.collect()
        self._num_updates, ended = 0, self._clock()
        self._not_before_s = ended + PAUSE * (ended - started)
