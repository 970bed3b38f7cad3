"""Observers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentgym.errors import ConfigError
from agentgym.loading import Wanted, load_named
from agentgym.settings.functions import convert_function_errors
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trajectory import Trajectory

__all__ = ["PHASES", "Observer", "Observers", "Unobserved", "own_observers"]

OBSERVER = Wanted(
    noun="observer",
    example="Class",
    hint="Derive it from agentgym.trainers.Unobserved, and override what it wants to hear.",
)
PHASES = {
    "compile": "compiling the engine's step (some seconds the first time)",
    "eval_before": "held-out play before training",
    "eval_during": "held-out play during training",
    "eval_after": "held-out play after training",
    "train": "training",
}
"""The phases of a run, as they are shown."""


@runtime_checkable
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


@dataclass(frozen=True)
class Observers:
    """An observer that tells several."""

    each: Sequence[Observer]

    def on_phase(self, name: str, episodes: int) -> None:
        """Tells each; the error of a user's observer names it."""
        for observer in self.each:
            with convert_function_errors(type(observer).__name__, type(observer)):
                observer.on_phase(name, episodes)

    def on_episode(self, trajectory: Trajectory) -> None:
        """Tells each."""
        for observer in self.each:
            with convert_function_errors(type(observer).__name__, type(observer)):
                observer.on_episode(trajectory)

    def on_step(self, metrics: StepMetrics) -> None:
        """Tells each."""
        for observer in self.each:
            with convert_function_errors(type(observer).__name__, type(observer)):
                observer.on_step(metrics)


def own_observers(places: Sequence[str]) -> list[Observer]:
    """Returns the observers that a run names; raises ConfigError for a class that is none."""
    observers: list[Observer] = []
    for place in places:
        kind = load_named(place, OBSERVER)
        if not callable(kind):
            raise ConfigError(f"{place!r} is not a class of an observer. {OBSERVER.hint}")
        with convert_function_errors(place, kind):
            observer: object = kind()
        if not isinstance(observer, Observer):
            raise ConfigError(f"{place!r} lacks on_phase, on_episode or on_step. {OBSERVER.hint}")
        observers.append(observer)
    return observers
