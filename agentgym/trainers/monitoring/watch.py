"""Watches a run for signs of collapse: logs each once, and stops the run if its settings ask for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from agentgym.errors import TrainingHalted
from agentgym.trainers.monitoring.collapse import Sign, signs_of_collapse
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.monitoring.vitals import Vitals
from agentgym.trainers.settings.collapse import SIGNS, CollapseConfig, SignName
from agentgym.types import JSON

__all__ = ["CollapseWatch"]

logger = logging.getLogger(__name__)


class CollapseWatch:
    """Judges each step by the steps before it; `lines` are the lines of `metrics.jsonl` of a resumed run."""

    def __init__(self, config: CollapseConfig, lines: Iterable[Mapping[str, JSON]] = ()) -> None:
        self.config = config
        self._history: list[Vitals] = []
        self._named: dict[SignName, Sign] = {}
        self._found: dict[SignName, str] = {}
        self._now: tuple[Sign, ...] = ()
        for line in lines:
            self._history.append(Vitals.of(line))
            self._recall(line)

    def _recall(self, line: Mapping[str, JSON]) -> None:
        warnings, step = line.get("warnings"), line.get("step")
        for text in warnings if isinstance(warnings, list) else ():
            given, _, sentence = str(text).partition(": ")
            for name in SIGNS:
                if name == given and isinstance(step, int):
                    self._named.setdefault(name, Sign(name, step, sentence))

    def add_sign(self, name: SignName, text: str) -> None:
        """Adds a sign that the step itself found; the next `see` logs it."""
        self._found[name] = text

    def see(self, metrics: StepMetrics) -> StepMetrics:
        """Returns the step's metrics with the signs of the step; logs those that are new."""
        self._history.append(Vitals.of(metrics.to_json()))
        texts = {**self._found, **signs_of_collapse(self._history, self.config)}
        self._found = {}
        for name, text in texts.items():
            if name not in self._named:
                self._named[name] = Sign(name, metrics.step, text)
                logger.warning("step %d: %s", metrics.step, self._named[name])
        self._now = tuple(self._named[name] for name in texts)
        return replace(metrics, signs=self._now)

    @property
    def is_finished(self) -> bool:
        """True if the last step showed that nothing is left to learn, and that ends the run."""
        return self._stops("solved") is not None

    @property
    def halt(self) -> TrainingHalted | None:
        """The error that ends the run after the last step; None if it goes on."""
        sign = next(
            (found for name in self.config.stop_on if name not in ("nan", "solved") and (found := self._stops(name))),
            None,
        )
        if sign is None:
            return None
        return TrainingHalted(
            f"{sign} (first seen at step {sign.step}; collapse.stop_on names {sign.name}, so training stops here)"
        )

    def _stops(self, name: SignName) -> Sign | None:
        return next((sign for sign in self._now if sign.name == name and name in self.config.stop_on), None)
