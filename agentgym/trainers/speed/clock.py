"""A clock that splits the seconds of a step by activity."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Activity", "StepClock", "StepTimes"]

Activity: TypeAlias = Literal["generate", "learn", "sync", "engine"]
"""`generate`: the loop waits for episodes; `engine`: a request is in flight, whatever waits for it."""

_STAGES: tuple[Activity, ...] = ("sync", "learn", "generate")
"""The stages by priority: a moment with several activities counts as the first of them."""
_WORK: tuple[Activity, ...] = ("sync", "learn", "engine")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The seconds of one step; the four stages add up to the whole.

    Example: of 10 s, with 6 waiting for episodes, 3 learning and 0.5 sending weights, 0.5 are the rest.
    """

    step_s: float
    generate_s: float
    learn_s: float
    sync_s: float
    rest_s: float
    sampling_s: float
    """The seconds in which episodes were played: `generate_s`, or the whole step if playing overlaps learning."""
    idle_s: float | None
    """The seconds in which neither the engine nor the learner had work; part of `generate_s` and `rest_s`. None if no
    engine reports its requests to the clock."""


class StepClock:
    """Sums the seconds of each activity from one `lap` to the next. All calls are made on one thread.

    A moment belongs to one stage: the weight update, else learning, else generation, else the rest. So generation that
    overlaps learning counts as learning, and shares add up to 1 whatever overlaps.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.plays_beside = False
        """True if episodes are played at any time, not only while the loop waits for them."""
        self.hears_engine = True
        """True if an engine reports when a request is in flight."""
        self._now = now
        self._going_on: Counter[Activity] = Counter()
        self._began = self._last = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Counts the body of the `with` statement as an activity, which may be running several times."""
        self._count()
        self._going_on[activity] += 1
        try:
            yield
        finally:
            self._count()
            self._going_on[activity] -= 1

    def lap(self) -> StepTimes:
        """Returns the seconds since the last lap, or since the clock was made."""
        self._count()
        spent, began = self._seconds, self._began
        self._seconds, self._began = defaultdict(float), self._last
        return StepTimes(
            step_s=self._last - began,
            generate_s=spent["generate"],
            learn_s=spent["learn"],
            sync_s=spent["sync"],
            rest_s=spent["rest"],
            sampling_s=self._last - began if self.plays_beside else spent["generate"],
            idle_s=spent["idle"] if self.hears_engine else None,
        )

    def _count(self) -> None:
        """Adds the seconds since the last count to the activities that were running."""
        now = self._now()
        seconds, self._last = now - self._last, now
        stage = next((activity for activity in _STAGES if self._going_on[activity]), "rest")
        self._seconds[stage] += seconds
        if not any(self._going_on[activity] for activity in _WORK):
            self._seconds["idle"] += seconds
