"""Decides when a run plays its held-out tasks, and when their scores end it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

__all__ = ["has_stalled", "is_target_near"]

NUM_STEPS = 2
"""The last steps whose own success has to reach the target."""
PAUSE = 5
"""The steps between two evaluations."""


def is_target_near(successes: Sequence[float], target: float) -> bool:
    """Returns whether the held-out tasks are played after the last of the steps with these shares of success.

    It depends on the steps alone, so a resumed run plays them at the same steps.
    """
    played = -PAUSE
    for step in range(NUM_STEPS, len(successes) + 1):
        if step - played >= PAUSE and fmean(successes[step - NUM_STEPS : step]) >= target:
            played = step
    return played == len(successes)


def has_stalled(scores: Sequence[tuple[float, float]], patience: int) -> bool:
    """Returns whether the last `patience` of these pairs of success and mean reward are no better than one before."""
    return len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])
