"""Rewards of one's own: `RewardConfig(function="examples/custom_reward.py:brief", settings={"per_turn": 0.1})`."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.rewards import Reward
from agentgym.trajectory import Trajectory
from agentgym.types import Task


def brief(trajectory: Trajectory, task: Task, *, per_turn: float = 0.05) -> Reward:
    """Returns the environment's reward, less `per_turn` for every turn after the first, each at its own turn."""
    earned = [turn.reward or 0.0 for turn in trajectory.turns]
    costs = [0.0] + [-per_turn] * (len(earned) - 1)
    turns = tuple(gain + cost for gain, cost in zip(earned, costs, strict=True))
    return Reward(sum(turns), {"environment": sum(earned), "brevity": sum(costs)}, turns=turns)


def shortest(trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> list[float]:
    """Returns the environment's reward, or half of it if a successful episode of the same task took fewer turns."""
    best: dict[str, int] = {}
    for trajectory, task in zip(trajectories, tasks, strict=True):
        if trajectory.success:
            best[task.key] = min(len(trajectory.turns), best.get(task.key, len(trajectory.turns)))
    return [
        (trajectory.reward or 0.0)
        * (1.0 if len(trajectory.turns) <= best.get(task.key, len(trajectory.turns)) else 0.5)
        for trajectory, task in zip(trajectories, tasks, strict=True)
    ]
