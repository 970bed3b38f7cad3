"""Losses that spare the few tokens whose update costs the most entropy: those of large covariance of A and logp."""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.trainers.algorithms.losses.clipped import check_clip, clipped_surrogate
from agentgym.trainers.algorithms.losses.policy_loss import PolicyLoss, Tokens, bundled_loss, loss_stats, require

__all__ = ["clip_cov", "kl_cov"]


@bundled_loss("clip_cov")
def clip_cov(  # noqa: PLR0913 - six settings, which a run sets by these names
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
) -> PolicyLoss:
    """The clipped surrogate, in which a few tokens of large covariance have no loss at all.

    Cui et al. 2025 (The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models), Clip-Cov: of
    the tokens with `cov_low < (A - mean A)(logp - mean logp) < cov_high` that the surrogate does not clip,
    `max(1, fraction * trained tokens)` are taken at random and left out; means are over the trained tokens. The
    surrogate is that of `ppo_clip` without dual clip. The arguments are those of every loss, see `policy_loss`; the
    covariance has the unit of A times nats, `fraction` lies in (0, 1].

    Differences from verl's `clip_cov`: the choice follows from `seed` and the order of the tokens alone, so the same
    step loses the same tokens; the log ratio is clamped to `MAX_LOG_RATIO`; means are float64.
    """
    check_clip(clip_low, clip_high, "0.2 is usual")
    require(0 < fraction <= 1, "fraction", fraction, "lie in (0, 1] (2e-4 is usual)")
    require(cov_low < cov_high, "cov_low", cov_low, f"be below cov_high, which is {cov_high}")
    loss, clipped = clipped_surrogate(tokens.ratio, tokens.gain, clip_low, clip_high)
    covariance = _covariance(tokens)
    candidates = tokens.mask & ~clipped & (covariance > cov_low) & (covariance < cov_high)
    index = candidates.reshape(-1).nonzero()[:, 0]
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(seed)).to(index.device)
    dropped = torch.zeros_like(tokens.mask).reshape(-1)
    dropped[index[order[: _share(fraction, tokens.mask)]]] = True
    dropped = dropped.reshape(tokens.mask.shape)
    return PolicyLoss(torch.where(dropped, 0.0, loss), loss_stats(tokens, clipped | dropped))


@bundled_loss("kl_cov")
def kl_cov(tokens: Tokens, *, fraction: float = 2e-4, kl_coefficient: float = 1.0) -> PolicyLoss:
    """`-r A` without clip, plus `kl_coefficient * |logp - old_logp|` for the tokens of the largest covariance.

    Cui et al. 2025 (The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models), KL-Cov: the
    `max(1, fraction * trained tokens)` tokens of largest `(A - mean A)(logp - mean logp)`, means over the trained
    tokens. The arguments are those of every loss, see `policy_loss`; `fraction` lies in (0, 1].

    Differences from verl's `kl_cov`: r is clamped as everywhere (`MAX_LOG_RATIO`); of equal covariances the first in
    order are taken; means are float64.
    """
    require(0 < fraction <= 1, "fraction", fraction, "lie in (0, 1] (2e-4 is usual)")
    require(kl_coefficient >= 0, "kl_coefficient", kl_coefficient, "be at least 0 (1.0 is usual)")
    covariance = torch.where(tokens.mask, _covariance(tokens), -torch.inf).reshape(-1)
    first = covariance.sort(descending=True, stable=True).indices[: _share(fraction, tokens.mask)]
    chosen = torch.zeros_like(tokens.mask).reshape(-1)
    chosen[first] = True
    chosen = chosen.reshape(tokens.mask.shape) & tokens.mask
    penalty = kl_coefficient * torch.where(chosen, tokens.difference, 0.0).abs()
    return PolicyLoss(penalty - tokens.gain * tokens.ratio, loss_stats(tokens, chosen))


def _share(fraction: float, mask: Tensor) -> int:
    return max(1, int(fraction * int(mask.sum())))


@torch.no_grad()
def _covariance(tokens: Tokens) -> Tensor:
    """Each token's part of the covariance of advantage and logprob, float64."""
    count = tokens.mask.sum().clamp(min=1)
    gain, logp = tokens.gain.double(), tokens.logp.double()
    return (gain - gain.sum() / count) * (logp - logp.sum() / count)
