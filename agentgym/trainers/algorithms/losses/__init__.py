"""Policy losses per token, one file per idea, and the critic's loss; see `aggregation` for their sum."""

from agentgym.trainers.algorithms.losses.clipped import ppo_clip
from agentgym.trainers.algorithms.losses.covariance import clip_cov, kl_cov
from agentgym.trainers.algorithms.losses.pair_sums import PairStats, PairSums
from agentgym.trainers.algorithms.losses.policy_loss import (
    LOSSES,
    LossStats,
    PolicyLoss,
    PolicyLossFn,
    Tokens,
    is_elementwise,
    is_silent_at_zero,
    loss_stats,
    loss_with,
    traits,
    traits_of,
)
from agentgym.trainers.algorithms.losses.preference import PreferenceForm, preference
from agentgym.trainers.algorithms.losses.sequence import geo_mean, gspo
from agentgym.trainers.algorithms.losses.smooth import dro, sapo
from agentgym.trainers.algorithms.losses.value import ValueLoss, value_clip
from agentgym.trainers.algorithms.losses.weighted import cispo, dppo_kl, dppo_tv, gpg, reinforce

__all__ = [
    "LOSSES",
    "LossStats",
    "PairStats",
    "PairSums",
    "PolicyLoss",
    "PolicyLossFn",
    "PreferenceForm",
    "Tokens",
    "ValueLoss",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "is_elementwise",
    "is_silent_at_zero",
    "kl_cov",
    "loss_stats",
    "loss_with",
    "ppo_clip",
    "preference",
    "reinforce",
    "sapo",
    "traits",
    "traits_of",
    "value_clip",
]
