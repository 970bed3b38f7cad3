"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Activity", "StepClock", "StepTimes"]

Activity: TypeAlias = Literal["generate", "learn", "sync", "engine"]
"""`generate`: the loop waits for episodes; `engine`: a request is in flight, whoever waits for it."""

_STAGES: tuple[Activity, ...] = ("sync", "learn", "generate")
"""What a moment counts as where several are on, the first one first."""
_WORK: tuple[Activity, ...] = ("sync", "learn", "engine")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step; the four stages add up to the whole.

    Example: of 10 s, 6 of them waiting for episodes, 3 learning and 0.5 sending weights, 0.5 are the rest.
    """

    step_s: float
    generate_s: float
    learn_s: float
    sync_s: float
    rest_s: float
    sampling_s: float
    """In which episodes were played: `generate_s`, or the whole step where playing goes on beside learning."""
    idle_s: float | None
    """In which neither the engine nor the learner had anything to do; parts of `generate_s` and `rest_s`. None where
    the clock hears of no engine."""


class StepClock:
    """Adds up what is going on, from one `lap` to the next. Everything on it happens on one thread.

    A moment is of one stage: of the weight update, else of learning, else of generation, else of the rest. So what a
    learner hides of generation counts as learning, and shares add up to 1 whatever overlaps.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.plays_beside = False
        """Whether episodes are played at any time, not only while the loop waits for them."""
        self.hears_engine = True
        """Whether somebody says when a request is in flight."""
        self._now = now
        self._going_on: Counter[Activity] = Counter()
        self._began = self._last = now()
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Around what is an activity; the same one may be on several times."""
        self._count()
        self._going_on[activity] += 1
        try:
            yield
        finally:
            self._count()
            self._going_on[activity] -= 1

    def lap(self) -> StepTimes:
        """The seconds since the last lap, or since the clock was made."""
        self._count()
        spent, began = self._spent, self._began
        self._spent, self._began = defaultdict(float), self._last
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
        """Gives the seconds since the last count to what was on."""
        now = self._now()
        seconds, self._last = now - self._last, now
        stage = next((one for one in _STAGES if self._going_on[one]), "rest")
        self._spent[stage] += seconds
        if not any(self._going_on[one] for one in _WORK):
            self._spent["idle"] += seconds
