"""Policy losses per token, and the numbers that tell how far the policy moved; aggregation is elsewhere.

Shapes: `N` packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.registry import Registry
from agentgym.trainers.kl import k3

__all__ = ["LOSSES", "ClipConfig", "LossStats", "PolicyLoss", "PolicyLossFn", "ppo_clip"]

MAX_LOG_RATIO = 20.0
"""Nats; the log ratio is clamped to it either way, so a ratio lies in [2.1e-9, 4.9e8] and its square is finite."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Where the importance ratio stops paying; raises ConfigError for bounds that cannot work."""

    clip_low: float = 0.2
    """A ratio below `1 - clip_low` is clipped; in (0, 1)."""
    clip_high: float = 0.2
    """A ratio above `1 + clip_high` is clipped; above 0. DAPO uses 0.28."""
    dual_clip: float | None = 3.0
    """The ratio beyond which a token of negative advantage is clipped too; above 1, or None for never."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ConfigError(f"clip_low is {self.clip_low}; it must lie between 0 and 1 (0.2 is usual)")
        if not self.clip_high > 0:
            raise ConfigError(f"clip_high is {self.clip_high}; it must be above 0 (0.2 and 0.28 are usual)")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}; it must be above 1 (3.0 is usual), or None for no bound")


@dataclass(frozen=True, eq=False)
class LossStats:
    """Sums over trained tokens, so that micro-batches and ranks add up: `total = first + second`.

    The fields are scalar tensors on the loss's device (reading a property waits for it); the properties are means,
    0 when there was no token.
    """

    num_tokens: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    kl_sum: Tensor

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            num_tokens=self.num_tokens + other.num_tokens,
            clipped=self.clipped + other.clipped,
            dual_clipped=self.dual_clipped + other.dual_clipped,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            kl_sum=self.kl_sum + other.kl_sum,
        )

    @property
    def clip_fraction(self) -> float:
        """Share of trained tokens without gradient because the ratio left its interval on the paying side."""
        return self._mean(self.clipped)

    @property
    def dual_clip_fraction(self) -> float:
        """Share of trained tokens without gradient because of the dual clip."""
        return self._mean(self.dual_clipped)

    @property
    def ratio_mean(self) -> float:
        """Mean importance ratio; 1 to rounding on the first minibatch of tokens that this policy sampled."""
        return self._mean(self.ratio_sum)

    @property
    def approx_kl(self) -> float:
        """KL(old policy || policy) in nats a token, by the `k3` estimate; never negative."""
        return self._mean(self.kl_sum)

    def _mean(self, total: Tensor) -> float:
        return float(total / self.num_tokens.clamp(min=1))


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A loss per token, to be weighted and summed, with its statistics (which carry no gradient)."""

    loss_N: Tensor
    stats: LossStats


class PolicyLossFn(Protocol):
    """A loss of `LOSSES`; see `ppo_clip` for the arguments."""

    def __call__(
        self, logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, mask_N: Tensor, config: ClipConfig
    ) -> PolicyLoss:
        """Gives the loss of each token, 0 where `mask_N` is False."""
        ...


LOSSES: Registry[PolicyLossFn] = Registry("policy loss")
"""Every policy loss by name."""


@LOSSES.register("ppo_clip")
def ppo_clip(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, mask_N: Tensor, config: ClipConfig) -> PolicyLoss:
    """The negated clipped surrogate of PPO, with a bound for each side and the dual clip.

    With `r = exp(logp - old_logp)`, L = clip_low, H = clip_high and c = dual_clip, the objective is
    `min(r A, clip(r, 1 - L, 1 + H) A)`, and for A < 0 the larger of that and `c A`.
    Schulman et al. 2017 (PPO), eq. 7; L and H apart: Yu et al. 2025 (DAPO), section 3.1 "Clip-Higher"; the bound `c A`:
    Ye et al. 2020 (Mastering Complex Control in MOBA Games), the objective of dual-clip PPO.

    `logp_N` alone carries gradient. `old_logp_N` is what the engine sampled with, so on the first minibatch of fresh
    tokens r is 1 to the rounding between engine and learner. Tokens outside `mask_N` have a loss and a gradient of
    exactly 0 whatever their numbers are, and are left out of the statistics.

    Difference: the log ratio is clamped to `MAX_LOG_RATIO` either way, and beyond it the gradient is 0. That only
    matters for A < 0 without dual clip, where the unclamped gradient would grow without bound.
    """
    old_N = old_logp_N.detach()
    log_ratio_N = torch.where(mask_N, logp_N - old_N, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    gain_N = torch.where(mask_N, advantage_N.detach(), 0.0)

    plain_N = -gain_N * ratio_N
    bounded_N = -gain_N * ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped_N = bounded_N > plain_N
    loss_N = torch.where(clipped_N, bounded_N, plain_N)
    dual_clipped_N = torch.zeros_like(clipped_N)
    if config.dual_clip is not None:
        ceiling_N = -gain_N * config.dual_clip
        dual_clipped_N = (gain_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(dual_clipped_N, ceiling_N, loss_N)
    return PolicyLoss(loss_N, _stats(ratio_N, log_ratio_N, mask_N, clipped_N, dual_clipped_N))


@torch.no_grad()
def _stats(
    ratio_N: Tensor, log_ratio_N: Tensor, mask_N: Tensor, clipped_N: Tensor, dual_clipped_N: Tensor
) -> LossStats:
    kept_N = torch.where(mask_N, ratio_N, 0.0)
    return LossStats(
        num_tokens=mask_N.sum(),
        clipped=clipped_N.sum(),
        dual_clipped=dual_clipped_N.sum(),
        ratio_sum=kept_N.sum(),
        ratio_max=kept_N.max() if kept_N.numel() else kept_N.sum(),
        kl_sum=k3(torch.zeros_like(log_ratio_N), log_ratio_N).sum(),
    )
