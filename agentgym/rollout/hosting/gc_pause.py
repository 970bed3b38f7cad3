"""Keeps Python's garbage collector from holding up thousands of episodes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["FullCollections", "young_garbage_only"]

NEVER = 1_000_000_000
"""Looks at the younger objects between two at the older ones."""
EVERY = 16
"""Updates from one full collection to the next, at least."""
PAUSE = 100
"""How many times as long as it took nothing is collected after a full collection."""


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """While it lasts, the collector looks at each new object once; its settings are as before afterwards.

    A full collection looks at every live object. With thousands of episodes those are millions: the event loop would
    stand still for up to a second, again and again, and a fifth of the CPU would go there. The second look, at what
    lived through ten first ones, is as vain: an episode outlives it, and its objects have left the processor's caches
    by then. With 40,000 live episodes it takes a tenth of all CPU time.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], NEVER, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class FullCollections:
    """Full collections between updates, for a run that is under `young_garbage_only` from its begin to its end.

    Each looks at every object of every live episode, which takes four seconds beside 100,000 of them. So one comes
    after 16 updates, and not before a hundred times as long as the last one took.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_updates = 0
        self._not_before_s = 0.0

    def count_update(self) -> None:
        """Collects, where it is time to."""
        self._num_updates += 1
        started = self._clock()
        if self._num_updates < EVERY or started < self._not_before_s:
            return
        gc.collect()
        self._num_updates, ended = 0, self._clock()
        self._not_before_s = ended + PAUSE * (ended - started)
