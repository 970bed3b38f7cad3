"""Watches a run for signs of collapse: names each once, and says when one ends it."""

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
    """Judges each step by those before it; `lines` are those of `metrics.jsonl` that a resumed run begins with."""

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
        told, step = line.get("warnings"), line.get("step")
        for text in told if isinstance(told, list) else ():
            given, _, sentence = str(text).partition(": ")
            for name in SIGNS:
                if name == given and isinstance(step, int):
                    self._named.setdefault(name, Sign(name, step, sentence))

    def found(self, name: SignName, text: str) -> None:
        """Takes a sign that the step itself found; the next `see` names it."""
        self._found[name] = text

    def see(self, metrics: StepMetrics) -> StepMetrics:
        """The step's metrics with the signs that stand at it; one that is new is logged."""
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
    def finished(self) -> bool:
        """Whether the last step showed that nothing is left to learn, and that ends the run."""
        return self._stops("solved") is not None

    @property
    def halt(self) -> TrainingHalted | None:
        """What ends the run after the last step, if anything does."""
        sign = next(
            (one for name in self.config.stop_on if name not in ("nan", "solved") and (one := self._stops(name))), None
        )
        if sign is None:
            return None
        return TrainingHalted(
            f"{sign} (first seen at step {sign.step}; collapse.stop_on names {sign.name}, so training stops here)"
        )

    def _stops(self, name: SignName) -> Sign | None:
        return next((one for one in self._now if one.name == name and name in self.config.stop_on), None)
