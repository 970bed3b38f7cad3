"""The result of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agentgym.evaluation.play.config import EvalConfig
from agentgym.evaluation.play.endpoint import EndpointUse
from agentgym.notebook.html_view import html_table, short_text
from agentgym.rollout.record.environments_file import read_environments
from agentgym.rollout.scores.statistics import EvalSummary
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["EvalResult"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation, and the folder of its episodes."""

    config: EvalConfig = field(repr=False)
    summary: EvalSummary
    output: Path
    trajectories: tuple[Trajectory, ...] = field(repr=False)
    """The episodes, task by task, repeat by repeat."""
    use: EndpointUse | None = None
    """The usage of the chat endpoint, if one played."""

    def __repr__(self) -> str:
        return short_text(f"<EvalResult {'; '.join(': '.join(row) for row in self._rows)}>")

    def _repr_html_(self) -> str:
        """Returns the result as a table."""
        return html_table("EvalResult", self._rows)

    @property
    def _rows(self) -> list[tuple[str, str]]:
        summary = self.summary
        return [
            ("environment", self.config.env),
            ("policy", self.config.policy),
            ("success", f"{summary.success} {summary.success_interval or ''}".strip()),
            ("reward", f"{summary.mean_reward} {summary.reward_interval or ''}".strip()),
            ("episodes", f"{summary.num_episodes}, and {summary.num_failed} that failed"),
            ("stop reasons", ", ".join(f"{reason} {number}" for reason, number in summary.stop_reasons.items())),
            ("folder", str(self.output)),
        ]

    def to_json(self) -> dict[str, JSON]:
        """Returns the summary, the settings, the environments' identities and the folder as one JSON object."""
        use = {} if self.use is None else {"use": self.use.to_json()}
        environments: dict[str, JSON] = {
            "environments": [dict(each) for each in read_environments(self.output).values()]
        }
        return {**self.summary.to_json(), **use, **self.config.to_json(), **environments, "output": str(self.output)}
