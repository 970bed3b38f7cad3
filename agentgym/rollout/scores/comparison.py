"""Compares evaluations task by task: their difference, with an interval that knows that the tasks are the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from agentgym.rollout.record.task_names import task_names
from agentgym.rollout.scores.intervals import ZERO_OR_ONE, Interval, difference_interval, mean_interval
from agentgym.types import JSON

if TYPE_CHECKING:  # a record's scores are compared without numpy, which trajectories hold their ids in
    from agentgym.trajectory import Trajectory

__all__ = ["Difference", "Scores", "paired_difference", "scores_by_task"]

Scores: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]
"""Success (0 or 1) and reward of the episodes of each task, failed ones left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The mean difference of two evaluations over the tasks that both played; the second minus the first."""

    num_tasks: int
    """The tasks that both played."""
    success: float
    success_interval: Interval | None
    """The 95% interval over tasks, see `difference_interval`."""
    reward: float
    reward_interval: Interval | None
    """The same of rewards of 0 and 1. Of others it is `mean_interval`: None for fewer than two tasks, or if the
    difference is the same in all of them."""

    def to_json(self) -> dict[str, JSON]:
        """Returns the numbers as a JSON object; intervals are `[low, high]`."""
        ends = {
            name: None if interval is None else interval.ends
            for name, interval in (
                ("success_interval", self.success_interval),
                ("reward_interval", self.reward_interval),
            )
        }
        return {"num_tasks": self.num_tasks, "success": self.success, "reward": self.reward, **ends}


def scores_by_task(trajectories: Sequence[Trajectory]) -> Scores:
    """Returns success and reward of the episodes that have a reward, by task."""
    scores: dict[str, list[tuple[float, float]]] = {}
    for name, trajectory in zip(task_names(trajectories), trajectories, strict=True):
        if trajectory.reward is not None:
            scores.setdefault(name, []).append((float(bool(trajectory.success)), trajectory.reward))
    return scores


def paired_difference(first: Scores, second: Scores) -> Difference | None:
    """Returns by how much the second evaluation is better, task by task; None without a task that both played.

    A task counts once, with the means of its episodes. The noise that the tasks' difficulty adds to both is not in the
    difference, so its interval is shorter than those of the two means.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    success, reward = ([_mean(second[task], part) - _mean(first[task], part) for task in common] for part in (0, 1))
    rewards = {episode[1] for scores in (first, second) for task in common for episode in scores[task]}
    return Difference(
        num_tasks=len(common),
        success=math.fsum(success) / len(common),
        success_interval=difference_interval(success),
        reward=math.fsum(reward) / len(common),
        reward_interval=difference_interval(reward) if rewards <= ZERO_OR_ONE else mean_interval(reward, common),
    )


def _mean(episodes: Sequence[tuple[float, float]], part: int) -> float:
    return math.fsum(episode[part] for episode in episodes) / len(episodes)
