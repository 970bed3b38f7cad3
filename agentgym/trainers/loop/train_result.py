"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from agentgym.notebook.html_view import html_table, short_text
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

    def __repr__(self) -> str:
        return short_text(f"<TrainResult {'; '.join(': '.join(row) for row in self._rows)}>")

    def _repr_html_(self) -> str:
        """Returns the result as a table."""
        return html_table("TrainResult", self._rows)

    @property
    def _rows(self) -> list[tuple[str, str]]:
        scores = [("held-out before", self.before), ("held-out after", self.after)]
        return [
            ("folder", str(self.folder)),
            ("steps", f"{self.steps}, ended by {self.end}"),
            *((name, f"success {score.success:.3f} of {score.episodes}") for name, score in scores if score),
            ("training", f"{self.train_s / 60:.1f} minutes, {self.peak_memory_mb:,.0f} MB"),
            ("checkpoint", str(self.checkpoint)),
        ]
