"""The statistics of a set of evaluation episodes: means, counts, intervals, and scores of repeated tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentgym.rollout.record.task_names import task_names
from agentgym.rollout.scores.intervals import ANY_REWARD, Interval, mean_interval, success_interval
from agentgym.rollout.scores.pass_at_k import RepeatScores, repeat_scores
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["FAILED_CALLS", "EvalSummary", "summarize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSummary:
    """The numbers of an evaluation; failed episodes count in `failed` and in nothing else.

    Rates and means are None if every episode failed.
    """

    success: float | None
    """The share of the episodes that succeeded."""
    success_interval: Interval | None
    """Wilson's score interval; if tasks repeat, with the effective number of episodes (see `success_interval`)."""
    mean_reward: float | None
    reward_interval: Interval | None
    """The interval of the mean (`mean_interval`).

    None for fewer than two tasks, and if a reward that is not 0 or 1 is the same in all.
    """
    num_tasks: int
    """The number of tasks by their seeds."""
    num_distinct: int
    """The number of distinct tasks; the intervals use these as the draws."""
    num_episodes: int
    """The number of episodes that have a reward."""
    failed: Mapping[str, int]
    """The number of episodes without a reward, by status."""
    stop_reasons: Mapping[str, int]
    """The number of episodes with a reward, by stop reason."""
    mean_turns: float | None
    mean_tokens: float | None
    """The mean number of sampled ids per episode; without ids, of the tokens that its endpoint counted."""
    malformed_calls: int
    """The number of calls that could not be read, over all episodes, as the four below."""
    truncated_calls: int = 0
    """The number of calls that the end of their reply cut."""
    unknown_tools: int = 0
    """The number of calls of a tool that does not exist."""
    invalid_arguments: int = 0
    """The number of calls whose arguments the tool's schema refuses."""
    tool_errors: int = 0
    """The number of calls whose tool failed or timed out, or that exceeded `max_calls_per_turn`."""
    at_k: tuple[RepeatScores, ...] = field(default=(), repr=False)
    """pass@k, pass^k and best@k: of all tasks, then of each environment and each difficulty if there are several."""

    @property
    def num_failed(self) -> int:
        """The number of episodes without a reward."""
        return sum(self.failed.values())

    def to_json(self) -> dict[str, JSON]:
        """Returns the summary as a JSON object; intervals are `[low, high]`."""
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


def summarize(trajectories: Sequence[Trajectory], reward_range: tuple[float, float] = ANY_REWARD) -> EvalSummary:
    """Returns the summary of an evaluation's trajectories, in any order; `reward_range` has the possible rewards."""
    played = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    failed = Counter(str(trajectory.status) for trajectory in trajectories if trajectory.reward is None)
    names = task_names(trajectories)
    clusters = [name for name, trajectory in zip(names, trajectories, strict=True) if trajectory.reward is not None]
    successes = [float(bool(trajectory.success)) for trajectory in played]
    rewards = [trajectory.reward or 0.0 for trajectory in played]
    return EvalSummary(
        success=_mean(successes),
        success_interval=success_interval(successes, clusters),
        mean_reward=_mean(rewards),
        reward_interval=mean_interval(rewards, clusters, reward_range),
        num_tasks=len({trajectory.task.key for trajectory in trajectories}),
        num_distinct=len(set(names)),
        num_episodes=len(played),
        failed=dict(sorted(failed.items())),
        stop_reasons=dict(sorted(Counter(str(trajectory.stop_reason) for trajectory in played).items())),
        mean_turns=_mean([float(len(trajectory.turns)) for trajectory in played]),
        mean_tokens=_mean([_sampled_tokens(trajectory) for trajectory in played]),
        **{name: int(sum(trajectory.metrics.get(name, 0) for trajectory in trajectories)) for name in FAILED_CALLS},
        at_k=repeat_scores(trajectories, reward_range),
    )


def _sampled_tokens(trajectory: Trajectory) -> float:
    num_tokens = sum(int(row.sampled_mask.sum()) for row in trajectory.rows)
    return float(num_tokens if trajectory.has_ids else trajectory.metrics.get("completion_tokens", 0))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _ends(interval: Interval | None) -> list[JSON] | None:
    return None if interval is None else interval.ends
