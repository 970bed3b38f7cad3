"""Watches a run for symptoms of collapse: logs each once, and stops the run if its settings ask for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from agentgym.errors import TrainingHalted
from agentgym.trainers.monitoring.collapse import Symptom, symptoms_of_collapse
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.monitoring.step_health import StepHealth
from agentgym.trainers.settings.collapse import SYMPTOMS, CollapseConfig, SymptomName
from agentgym.types import JSON

__all__ = ["CollapseWatch"]

logger = logging.getLogger(__name__)


class CollapseWatch:
    """Judges each step by the steps before it; `lines` are the lines of `metrics.jsonl` of a resumed run.

    Symptoms that are `ignored` are none in this run: a run that only distills needs no differences of reward.
    """

    def __init__(
        self,
        config: CollapseConfig,
        lines: Iterable[Mapping[str, JSON]] = (),
        ignored: Collection[SymptomName] = (),
    ) -> None:
        self.config = config
        self._ignored_names = ignored
        self._history: list[StepHealth] = []
        self._symptoms: dict[SymptomName, Symptom] = {}
        self._step_texts: dict[SymptomName, str] = {}
        self._now: tuple[Symptom, ...] = ()
        for line in lines:
            self._history.append(StepHealth.of(line))
            self._recall(line)

    def _recall(self, line: Mapping[str, JSON]) -> None:
        warnings, step = line.get("warnings"), line.get("step")
        for text in warnings if isinstance(warnings, list) else ():
            symptom, _, sentence = str(text).partition(": ")
            for name in SYMPTOMS:
                if name == symptom and isinstance(step, int):
                    self._symptoms.setdefault(name, Symptom(name, step, sentence))

    def add_symptom(self, name: SymptomName, text: str) -> None:
        """Adds a symptom that the step itself found; the next `see` logs it."""
        self._step_texts[name] = text

    def see(self, metrics: StepMetrics) -> StepMetrics:
        """Returns the step's metrics with the symptoms of the step; logs those that are new."""
        self._history.append(StepHealth.of(metrics.to_json()))
        symptoms = {**self._step_texts, **symptoms_of_collapse(self._history, self.config)}
        texts = {name: text for name, text in symptoms.items() if name not in self._ignored_names}
        self._step_texts = {}
        for name, text in texts.items():
            if name not in self._symptoms:
                self._symptoms[name] = Symptom(name, metrics.step, text)
                logger.warning("step %d: %s", metrics.step, self._symptoms[name])
        self._now = tuple(self._symptoms[name] for name in texts)
        return replace(metrics, symptoms=self._now)

    @property
    def successes(self) -> Sequence[float]:
        """The share of successes of each step, from the first."""
        return [health.success for health in self._history]

    @property
    def is_finished(self) -> bool:
        """True if the last step showed that nothing is left to learn, and that ends the run."""
        return self._stops("solved") is not None

    @property
    def halt(self) -> TrainingHalted | None:
        """The error that ends the run after the last step; None if it goes on."""
        symptom = next(
            (reason for name in self.config.stop_on if name not in ("nan", "solved") and (reason := self._stops(name))),
            None,
        )
        if symptom is None:
            return None
        return TrainingHalted(
            f"{symptom} (first seen at step {symptom.step}; collapse.stop_on names {symptom.name}, so training stops"
            " here)"
        )

    def _stops(self, name: SymptomName) -> Symptom | None:
        return next((symptom for symptom in self._now if symptom.name == name and name in self.config.stop_on), None)
