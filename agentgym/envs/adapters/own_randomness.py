"""`OwnRandomness`: the process's random numbers, lent to one foreign environment at a time."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["OwnRandomness"]

logger = logging.getLogger(__name__)

States: TypeAlias = "tuple[Any, Any]"
MAX_S = 45.0
"""The seconds that others wait for a call; below `limits.env_step_s`, which includes their waiting."""


class OwnRandomness:
    """Gives code that draws from `random` and `numpy.random` a stream of its own, and leaves the process's as it was.

    Foreign code runs under it one call at a time in a process: two that draw from one stream at once would give
    neither of them the episode of its seed. Others wait `MAX_S` for one that hangs, then go on with a warning.
    """

    def __init__(self) -> None:
        self._states: States | None = None

    @contextmanager
    def start_stream(self, seed: int) -> Iterator[None]:
        """Begins the stream of `seed`; code that runs within draws from it."""
        with self._lend_stream():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Continues the stream from where the last call left it."""
        with self._lend_stream():
            if self._states is not None:
                _set(self._states)
            yield

    @contextmanager
    def _lend_stream(self) -> Iterator[None]:
        loan = _take_loan()
        try:
            yield
        finally:
            states = _return_loan(loan)
            if states is not None:
                self._states = states


@dataclass(frozen=True, eq=False)
class _Loan:
    thread: int
    since: float
    before: States
    outer: _Loan | None
    """The loan of the same thread that encloses this one."""


_changed = threading.Condition()
_current: _Loan | None = None


def _take_loan() -> _Loan:
    """Takes a loan as soon as no other thread has one."""
    global _current
    me = threading.get_ident()
    with _changed:
        while _current is not None and _current.thread != me:
            left_s = _current.since + MAX_S - time.monotonic()
            if left_s > 0:
                _changed.wait(left_s)
            else:
                _call_in(_current)
        _current = _Loan(me, time.monotonic(), _get(), _current)
        return _current


def _return_loan(loan: _Loan) -> States | None:
    """Ends a loan and returns the state of its stream; None if the loan was called in."""
    global _current
    with _changed:
        if _current is not loan:
            return None
        states = _get()
        _set(loan.before)
        _current = loan.outer
        _changed.notify()
        return states


def _call_in(loan: _Loan) -> None:
    """Ends the loan of a call that does not return."""
    global _current
    logger.warning(
        "a call of an environment has taken over %g s, and others wait for it no longer: what it draws from now on is "
        "theirs, so one seed may give two episodes",
        MAX_S,
    )
    while loan.outer is not None:
        loan = loan.outer
    _set(loan.before)
    _current = None
    _changed.notify()


def _get() -> States:
    return random.getstate(), np.random.get_state()


def _set(states: States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
