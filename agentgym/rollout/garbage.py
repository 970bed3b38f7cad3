"""Keeps Python's garbage collector from holding up thousands of episodes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["young_garbage_only"]

NEVER = 1_000_000_000
"""Looks at the younger objects between two at the older ones."""


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
