"""`OwnRandomness`: the process's random numbers, lent to one foreign environment at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["OwnRandomness"]

_ONE_AT_A_TIME = threading.RLock()


class OwnRandomness:
    """Gives code that draws from `random` and `numpy.random` a stream of its own, and leaves the process's as it was.

    Foreign code runs under it one call at a time in a process: two that draw from one stream at once would give
    neither of them the episode of its seed.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Begins the stream of `seed`; what runs within draws from it."""
        with self._lent():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Goes on with the stream where the last call left it."""
        with self._lent():
            if self._states is not None:
                _set(self._states)
            yield

    @contextmanager
    def _lent(self) -> Iterator[None]:
        with _ONE_AT_A_TIME:
            before = _get()
            try:
                yield
            finally:
                self._states = _get()
                _set(before)


def _get() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
