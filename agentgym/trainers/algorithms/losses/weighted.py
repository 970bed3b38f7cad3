"""Losses of the form `-w A logp`, whose weight carries no gradient: every token keeps one, however far it moved."""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.trainers.algorithms.losses.policy_loss import PolicyLoss, Tokens, bundled_loss, loss_stats, require

__all__ = ["cispo", "dppo_kl", "dppo_tv", "gpg", "reinforce"]

PROBABILITY_EPSILON = 1e-8


@bundled_loss("reinforce", elementwise=True, silent_at_zero=True)
def reinforce(tokens: Tokens, *, max_ratio: float | None = None) -> PolicyLoss:
    """`-A logp`, or `-sg(min(r, max_ratio)) A logp` where `max_ratio` is given; sg stops the gradient.

    Williams 1992 (REINFORCE), section 4. With r = exp(logp - old_logp) the second form is the policy gradient under
    truncated importance sampling (Ionides 2008; per token, so biased over whole sequences). The arguments are those of
    every loss, see `policy_loss`; `max_ratio` is above 0, in ratios.

    Without `max_ratio` the samples are taken as on-policy, and `old_logp` only enters the statistics. The loss's value
    has no meaning; its gradient on fresh samples is -A grad logp. Equal to verl's `reinforce`, whose weights come from
    its rollout correction: ours are `CORRECTIONS` or `max_ratio`.
    """
    require(max_ratio is None or max_ratio > 0, "max_ratio", max_ratio, "be above 0 (2.0 is usual), or None")
    if max_ratio is None:
        return PolicyLoss(-tokens.gain * tokens.logp, loss_stats(tokens))
    weight = tokens.ratio.detach().clamp(max=max_ratio)
    return PolicyLoss(-weight * tokens.gain * tokens.logp, loss_stats(tokens, tokens.ratio > max_ratio))


@bundled_loss("gpg", elementwise=True, silent_at_zero=True)
def gpg(tokens: Tokens) -> PolicyLoss:
    """`-A logp`: the plain policy gradient, without ratio and without clip.

    Chu et al. 2025 (GPG: A Simple and Strong Reinforcement Learning Baseline); the paper's rescaling of the
    advantages by the share of live groups is the estimator `gpg`. The arguments are those of every loss, see
    `policy_loss`. `old_logp` only enters the statistics. Equal to verl's `gpg`.
    """
    return PolicyLoss(-tokens.gain * tokens.logp, loss_stats(tokens))


@bundled_loss("cispo", elementwise=True, silent_at_zero=True)
def cispo(tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 0.2) -> PolicyLoss:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp`: the weight is clipped, the gradient never cut off.

    MiniMax et al. 2025 (MiniMax-M1), eq. 4 and 5; r = exp(logp - old_logp), sg stops the gradient. The arguments are
    those of every loss, see `policy_loss`; the bounds are in ratios, above 0.

    Defaults: no lower bound, as in the paper (a `clip_low` of 1 or more is none); the paper names no upper bound, 0.2
    is that of verl's recipe. With equal bounds the numbers are those of verl's `cispo`, whose own default is 0.2 for
    both. Difference from the paper: the log ratio is clamped to `MAX_LOG_RATIO` either way.
    """
    require(clip_low > 0, "clip_low", clip_low, "be above 0 (1 and more are no bound)")
    require(clip_high > 0, "clip_high", clip_high, "be above 0 (0.2 is usual)")
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight * tokens.gain * tokens.logp, loss_stats(tokens, weight != ratio))


@bundled_loss("dppo_tv", elementwise=True, silent_at_zero=True)
def dppo_tv(tokens: Tokens, *, clip_low: float = 0.15, clip_high: float = 0.15, max_ratio: float = 20.0) -> PolicyLoss:
    """`-sg(min(r, max_ratio)) A logp` for tokens inside a trust region of total variation, 0 for those that leave it.

    Qi et al. 2026 (Rethinking the Trust Region in LLM Reinforcement Learning), DPPO with the binary approximation: with
    p and q the token's probabilities under the policy and the old one, a token of A > 0 is cut where
    `p - q > clip_high`, any other where `p - q < -clip_low`. The arguments are those of every loss, see `policy_loss`;
    the bounds are differences of probabilities, in (0, 1].

    Defaults: 0.15 and a truncation of the ratio at 20 (the paper's section 5.4 asks for a large one), as in verl's
    recipe. Equal to verl's `dppo_tv` with the same settings.
    """
    _check_region(clip_low, clip_high, max_ratio)
    gap = tokens.logp.detach().double().exp() - tokens.old_logp.double().exp()
    return _inside_region(tokens, torch.where(tokens.gain > 0, gap <= clip_high, gap >= -clip_low), max_ratio)


@bundled_loss("dppo_kl", elementwise=True, silent_at_zero=True)
def dppo_kl(tokens: Tokens, *, clip_low: float = 0.05, clip_high: float = 0.05, max_ratio: float = 20.0) -> PolicyLoss:
    """`-sg(min(r, max_ratio)) A logp` for tokens inside a trust region of KL divergence, 0 for those that leave it.

    Qi et al. 2026 (Rethinking the Trust Region in LLM Reinforcement Learning), DPPO with the binary approximation: with
    p and q the token's probabilities under the policy and the old one and
    `D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))`, a token of A > 0 is cut where `D > clip_high` and p > q, any
    other where `D > clip_low` and p < q. The arguments are those of every loss, see `policy_loss`; the bounds are in
    nats, above 0.

    Defaults: 0.05 and a truncation of the ratio at 20, as in verl's recipe. Equal to verl's `dppo_kl` with the same
    settings, its 1e-8 added to `1 - q` and `1 - p` included; D itself is computed in float64.
    """
    _check_region(clip_low, clip_high, max_ratio)
    logp64, old64 = tokens.logp.detach().double(), tokens.old_logp.double()
    new, old = logp64.exp(), old64.exp()
    rest = (1 - old) * ((1 - old + PROBABILITY_EPSILON) / (1 - new + PROBABILITY_EPSILON)).log()
    divergence = old * (old64 - logp64) + rest
    up, down = (divergence <= clip_high) | (new <= old), (divergence <= clip_low) | (new >= old)
    return _inside_region(tokens, torch.where(tokens.gain > 0, up, down), max_ratio)


def _check_region(clip_low: float, clip_high: float, max_ratio: float) -> None:
    require(clip_low > 0, "clip_low", clip_low, "be above 0")
    require(clip_high > 0, "clip_high", clip_high, "be above 0")
    require(max_ratio > 1, "max_ratio", max_ratio, "be above 1 (20 is usual)")


def _inside_region(tokens: Tokens, inside: Tensor, max_ratio: float) -> PolicyLoss:
    weight = torch.where(inside, tokens.ratio.detach().clamp(max=max_ratio), 0.0)
    return PolicyLoss(-weight * tokens.gain * tokens.logp, loss_stats(tokens, ~inside))
