"""Advantage estimators: pure functions from rewards to the advantage of each sampled token, by name in `ADVANTAGES`."""

from __future__ import annotations

from agentgym.trainers.algorithms.advantages.credit import Credit, Groups
from agentgym.trainers.algorithms.advantages.group_baselines import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    no_advantage,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from agentgym.trainers.algorithms.advantages.registry import ADVANTAGES, AdvantageEstimator
from agentgym.trainers.algorithms.advantages.returns import (
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
    tir_optimal_token_baseline,
)
from agentgym.trainers.algorithms.advantages.turns import gigpo, return_batch_norm, turn_gae, turn_group, turn_returns

__all__ = [
    "ADVANTAGES",
    "AdvantageEstimator",
    "Credit",
    "Groups",
    "dr_grpo",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "no_advantage",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "return_batch_norm",
    "rloo",
    "tir_optimal_token_baseline",
    "turn_gae",
    "turn_group",
    "turn_returns",
]
