"""Rewards of episodes: your own function, a scorer by name, a server, a judge or a learned model.

async with open_rewards(RewardConfig(function="gsm8k")) as rewards:
    sampler = Sampler(rewards.loop(RolloutLoop(engine, renderer)))
    groups = await sampler.sample(tasks, group_size=8)
    if rewards.together:
        groups = await rewards.score_groups(groups)
"""

from agentgym.rewards import scorers
from agentgym.rewards.config import RewardConfig
from agentgym.rewards.function import RewardFunction
from agentgym.rewards.loop import RewardedLoop
from agentgym.rewards.overlong import overlong_penalty
from agentgym.rewards.registry import REWARDS
from agentgym.rewards.reply import conversation, ground_truth, last_reply, opening, whole_reply
from agentgym.rewards.reward import InvalidReward, Reward, RewardFailure, UnusableReward
from agentgym.rewards.rewards import Rewards, open_rewards

__all__ = [
    "REWARDS",
    "InvalidReward",
    "Reward",
    "RewardConfig",
    "RewardFailure",
    "RewardFunction",
    "RewardedLoop",
    "Rewards",
    "UnusableReward",
    "conversation",
    "ground_truth",
    "last_reply",
    "open_rewards",
    "opening",
    "overlong_penalty",
    "scorers",
    "whole_reply",
]
