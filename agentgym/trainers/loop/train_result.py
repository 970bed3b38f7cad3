"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from agentgym.trainers.monitoring.metrics import EvalScore

__all__ = ["RunEnd", "TrainResult"]


RunEnd: TypeAlias = Literal["steps", "target_success", "max_minutes", "solved", "patience", "interrupted"]
"""The reason why a run ended: the setting that says so, or an interrupt."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a finished or interrupted run."""

    folder: Path
    checkpoint: Path | None
    steps: int
    before: EvalScore | None
    after: EvalScore | None
    train_s: float
    """The seconds of playing and learning since the run began, without evaluations."""
    peak_memory_mb: float
    end: RunEnd = "steps"
