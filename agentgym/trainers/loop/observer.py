"""Observers of a run."""

from __future__ import annotations

from typing import Protocol

from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trajectory import Trajectory

__all__ = ["Observer", "Unobserved"]


class Observer(Protocol):
    """Receives the events of a run; the command line displays them."""

    def on_phase(self, name: str, episodes: int) -> None:
        """Called when a phase of so many episodes begins: `compile` (none), `eval_before`, `train`, `eval_during`
        or `eval_after`. After `eval_during`, training may go on."""

    def on_episode(self, trajectory: Trajectory) -> None:
        """Called when an episode of an evaluation is finished."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Called when an optimizer step is done and recorded."""


class Unobserved:
    """An observer that shows nothing: everything is in the run folder."""

    def on_phase(self, name: str, episodes: int) -> None:
        """Shows nothing."""

    def on_episode(self, trajectory: Trajectory) -> None:
        """Shows nothing."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Shows nothing."""
