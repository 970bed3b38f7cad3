"""The symptoms of a collapsing run, and which of them end it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, TypeAlias, get_args

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_named_numbers

__all__ = ["SYMPTOMS", "THRESHOLDS", "CollapseConfig", "SymptomName"]

SymptomName: TypeAlias = Literal[
    "nan",
    "tool_faults",
    "replies_cut",
    "dead_groups",
    "solved",
    "success_lost",
    "no_format",
    "format_lost",
    "tools_lost",
    "entropy_lost",
    "entropy_exploded",
    "repetition",
    "clipped",
    "gradient_exploded",
    "kl_exploded",
    "merge_lost",
]


SYMPTOMS: tuple[SymptomName, ...] = get_args(SymptomName)
"""Every symptom by name; `docs/collapse.md` describes how each is detected."""


THRESHOLDS: Mapping[str, float] = {
    "tool_faults": 0.1,
    "repetition": 0.3,
    "clipped": 0.9,
    "gradient_exploded": 10.0,
    "kl_exploded": 2.0,
}
"""The thresholds that a run may set, above 0: the share of a tool's calls that fail by no mistake of the model;
the rise of `repeated_ngrams` or `repeated_replies` while the success does not rise; the share of clipped tokens; the
gradient norm as a multiple of its median over the last 20 steps; the nats a token from the reference model."""


@config_class
class CollapseConfig:
    """The thresholds of a collapsing run's symptoms, and the symptoms that end it."""

    stop_on: tuple[SymptomName, ...] = ("nan",)
    """The symptoms that end training, with a checkpoint of the last whole step; the others only log a warning. Without
    `nan`, a step whose loss or gradient is not finite is left out, and training goes on. `solved` ends training as the
    last step would."""
    patience: int = 2
    """Steps in a row that must show a symptom before it is reported; `nan` is reported at once."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """The thresholds of symptoms by their names, such as clipped=0.95; others have their defaults (`THRESHOLDS`)."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"collapse.patience must be at least 1, got {self.patience}")
        check_named_numbers("collapse.thresholds", self.thresholds, THRESHOLDS)
        for symptom, threshold in self.thresholds.items():
            bound = 1 if symptom == "gradient_exploded" else 0  # the median itself is no explosion
            if not threshold > bound:
                raise ConfigError(f"collapse.thresholds {symptom} must be above {bound}, got {threshold:g}")

    def threshold(self, symptom: SymptomName) -> float:
        """Returns the threshold of a symptom in `THRESHOLDS`."""
        return self.thresholds.get(symptom, THRESHOLDS[symptom])
