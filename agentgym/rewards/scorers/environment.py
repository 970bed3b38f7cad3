"""The environment's own reward by name, to be one of several."""

from __future__ import annotations

from agentgym.rewards.registry import REWARDS
from agentgym.rewards.reward import Reward
from agentgym.trajectory import Trajectory
from agentgym.types import Task

__all__ = ["environment_reward"]


@REWARDS.register("environment")
def environment_reward(trajectory: Trajectory, task: Task) -> Reward:
    """Returns the environment's own reward, turn by turn."""
    turns = tuple(turn.reward or 0.0 for turn in trajectory.turns)
    return Reward(trajectory.reward or 0.0, turns=turns)
