"""Who watches a run."""

from __future__ import annotations

from typing import Protocol

from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trajectory import Trajectory

__all__ = ["Observer", "Unobserved"]


class Observer(Protocol):
    """Sees a run as it goes; the command line draws it."""

    def on_phase(self, name: str, episodes: int) -> None:
        """A stage of `episodes` episodes begins: `compile` (of none), `eval_before`, `train` or `eval_after`."""

    def on_episode(self, trajectory: Trajectory) -> None:
        """An episode of an evaluation is finished."""

    def on_step(self, metrics: StepMetrics) -> None:
        """An optimizer step is done and recorded."""


class Unobserved:
    """Nobody watches: the run folder has it all."""

    def on_phase(self, name: str, episodes: int) -> None:
        """Shows nothing."""

    def on_episode(self, trajectory: Trajectory) -> None:
        """Shows nothing."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Shows nothing."""
