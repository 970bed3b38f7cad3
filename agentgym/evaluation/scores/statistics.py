"""What a set of evaluation episodes says: means, counts, intervals, and what repeats of a task show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.evaluation.scores.intervals import Interval, mean_interval, success_interval
from agentgym.evaluation.scores.pass_at_k import RepeatScores, repeat_scores
from agentgym.rollout.record.task_names import task_names
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["FAILED_CALLS", "EvalSummary", "summarize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSummary:
    """The numbers of an evaluation; failed episodes count in `failed` and in nothing else.

    Rates and means are None when every episode failed.
    """

    success: float | None
    """Share of the episodes that succeeded."""
    success_interval: Interval | None
    """Wilson's score interval; where tasks repeat, with the effective number of episodes (see `success_interval`)."""
    mean_reward: float | None
    reward_interval: Interval | None
    """Normal interval of the mean, its error clustered by task; None for fewer than two tasks."""
    num_tasks: int
    """Tasks by their seeds."""
    num_distinct: int
    """Tasks that differ; the intervals take these as the draws."""
    num_episodes: int
    """Episodes that have a reward."""
    failed: Mapping[str, int]
    """Status to number, of the episodes that have none."""
    stop_reasons: Mapping[str, int]
    """Stop reason to number, of the episodes that have a reward."""
    mean_turns: float | None
    mean_tokens: float | None
    """Sampled ids per episode; where it holds none, as many tokens as its endpoint counted."""
    malformed_calls: int
    """Calls that could not be read, over all episodes, as the four below."""
    truncated_calls: int = 0
    """Calls that the end of their reply cut."""
    unknown_tools: int = 0
    """Calls of a tool that does not exist."""
    invalid_arguments: int = 0
    """Calls whose arguments the tool's schema refuses."""
    tool_errors: int = 0
    """Calls that were answered with an error of their tool, or not in time, or exceeded `max_calls_per_turn`."""
    at_k: tuple[RepeatScores, ...] = ()
    """pass@k, pass^k and best@k: of all tasks, then of each environment and of each difficulty where there are several.
    """

    @property
    def num_failed(self) -> int:
        """Episodes without a reward."""
        return sum(self.failed.values())

    def to_json(self) -> dict[str, JSON]:
        """The summary as a JSON object; intervals are `[low, high]`."""
        return {
            "success": self.success,
            "success_interval": _ends(self.success_interval),
            "mean_reward": self.mean_reward,
            "reward_interval": _ends(self.reward_interval),
            "num_episodes": self.num_episodes,
            "num_tasks": self.num_tasks,
            "num_distinct": self.num_distinct,
            "num_failed": self.num_failed,
            "failed": dict(self.failed),
            "stop_reasons": dict(self.stop_reasons),
            "mean_turns": self.mean_turns,
            "mean_tokens": self.mean_tokens,
            **{name: getattr(self, name) for name in FAILED_CALLS},
            "at_k": [scores.to_json() for scores in self.at_k],
        }


FAILED_CALLS = ("malformed_calls", "truncated_calls", "unknown_tools", "invalid_arguments", "tool_errors")
"""The metrics of an episode that count its failed calls; no call is in two of them."""


def summarize(trajectories: Sequence[Trajectory]) -> EvalSummary:
    """The summary of an evaluation's trajectories, in any order."""
    played = [one for one in trajectories if one.reward is not None]
    failed = Counter(str(one.status) for one in trajectories if one.reward is None)
    names = task_names(trajectories)
    clusters = [name for name, one in zip(names, trajectories, strict=True) if one.reward is not None]
    successes = [float(bool(one.success)) for one in played]
    rewards = [one.reward or 0.0 for one in played]
    return EvalSummary(
        success=_mean(successes),
        success_interval=success_interval(successes, clusters),
        mean_reward=_mean(rewards),
        reward_interval=mean_interval(rewards, clusters),
        num_tasks=len({one.task.key for one in trajectories}),
        num_distinct=len(set(names)),
        num_episodes=len(played),
        failed=dict(sorted(failed.items())),
        stop_reasons=dict(sorted(Counter(str(one.stop_reason) for one in played).items())),
        mean_turns=_mean([float(len(one.turns)) for one in played]),
        mean_tokens=_mean([_sampled_tokens(one) for one in played]),
        **{name: int(sum(one.metrics.get(name, 0) for one in trajectories)) for name in FAILED_CALLS},
        at_k=repeat_scores(trajectories),
    )


def _sampled_tokens(trajectory: Trajectory) -> float:
    held = sum(int(row.sampled.sum()) for row in trajectory.rows)
    return float(held if trajectory.has_ids else trajectory.metrics.get("completion_tokens", 0))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _ends(interval: Interval | None) -> list[JSON] | None:
    return None if interval is None else interval.ends
