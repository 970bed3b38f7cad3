"""Rewards of one's own: `RewardConfig(function="examples/custom_reward.py:brief", settings={"per_turn": 0.1})`."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.rewards import Reward
from agentgym.trajectory import Trajectory
from agentgym.types import Task


def brief(trajectory: Trajectory, task: Task, *, per_turn: float = 0.05) -> Reward:
    """The environment's reward, less `per_turn` for every turn after the first, each at the turn that it is for."""
    earned = [turn.reward or 0.0 for turn in trajectory.turns]
    costs = [0.0] + [-per_turn] * (len(earned) - 1)
    turns = tuple(gain + cost for gain, cost in zip(earned, costs, strict=True))
    return Reward(sum(turns), {"environment": sum(earned), "brevity": sum(costs)}, turns=turns)


def shortest(trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> list[float]:
    """The environment's reward, where no successful episode of the same task took fewer turns; half of it otherwise."""
    best: dict[str, int] = {}
    for trajectory, task in zip(trajectories, tasks, strict=True):
        if trajectory.success:
            best[task.key] = min(len(trajectory.turns), best.get(task.key, len(trajectory.turns)))
    return [
        (one.reward or 0.0) * (1.0 if len(one.turns) <= best.get(task.key, len(one.turns)) else 0.5)
        for one, task in zip(trajectories, tasks, strict=True)
    ]
