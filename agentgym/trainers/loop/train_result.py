"""What a run has to show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentgym.trainers.monitoring.metrics import EvalScore

__all__ = ["TrainResult"]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished or interrupted run has to show."""

    folder: Path
    checkpoint: Path | None
    steps: int
    before: EvalScore | None
    after: EvalScore | None
    train_s: float
    """Seconds of playing and learning since the run began, evaluations not counted."""
    peak_memory_mb: float
    interrupted: bool = False
