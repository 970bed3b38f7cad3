"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentgym.trainers.monitoring.metrics import EvalScore

__all__ = ["TrainResult"]


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
    interrupted: bool = False
