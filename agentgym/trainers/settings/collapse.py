"""The symptoms of a collapsing run, and which of them end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from agentgym.errors import ConfigError, nearest

__all__ = ["SYMPTOMS", "CollapseConfig", "SymptomName"]

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


@dataclass(frozen=True, kw_only=True)
class CollapseConfig:
    """The thresholds of a collapsing run's symptoms, and the symptoms that end it."""

    stop_on: tuple[SymptomName, ...] = ("nan",)
    """The symptoms that end training, with a checkpoint of the last whole step; the others only log a warning. Without
    `nan`, a step whose loss or gradient is not finite is left out, and training goes on. `solved` ends training as the
    last step would."""
    patience: int = 2
    """Steps in a row that must show a symptom before it is reported; `nan` is reported at once."""
    max_clip_fraction: float = 0.9
    """The share of clipped tokens above which a step teaches next to nothing."""
    max_grad_growth: float = 10.0
    """The gradient norm, as a multiple of its median over the last 20 steps, above which it explodes."""
    max_kl: float = 2.0
    """The divergence from the reference model, in nats a token, above which the policy runs away from it."""
    max_tool_faults: float = 0.1
    """The share of a tool's calls that may fail by no mistake of the model; their episodes are lost to training."""
    max_repetition_rise: float = 0.3
    """The rise of `repeated_ngrams` or `repeated_replies`, which are shares, that is allowed while the success does not
    rise."""

    def __post_init__(self) -> None:
        for name in self.stop_on:
            if name not in SYMPTOMS:
                raise ConfigError(
                    f"collapse.stop_on names {name!r}{nearest(name, SYMPTOMS) or '.'} Known: {', '.join(SYMPTOMS)}"
                )
        if self.patience < 1:
            raise ConfigError(f"collapse.patience must be at least 1, got {self.patience}")
        bounds = {"max_clip_fraction": 0, "max_grad_growth": 1, "max_kl": 0, "max_repetition_rise": 0}
        for setting, bound in (bounds | {"max_tool_faults": 0}).items():
            if not getattr(self, setting) > bound:
                raise ConfigError(f"collapse.{setting} must be above {bound}, got {getattr(self, setting)}")
