"""Losses that hold the policy back without a hard clip: a soft gate, and a quadratic penalty."""

from __future__ import annotations

import torch

from agentgym.trainers.algorithms.losses.policy_loss import PolicyLoss, Tokens, bundled_loss, loss_stats, require

__all__ = ["dro", "sapo"]


@bundled_loss("sapo", elementwise=True, silent_at_zero=True)
def sapo(tokens: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PolicyLoss:
    """`-f(r) A` with the gate `f(r) = sigmoid(tau (r - 1)) * 4 / tau`.

    Gao et al. 2025 (Soft Adaptive Policy Optimization); r = exp(logp - old_logp), and tau is
    `tau_positive` for A > 0, `tau_negative` otherwise. At r = 1 the gate's slope is 1, so fresh tokens have the plain
    policy gradient; away from it the slope falls to 0, faster for the larger tau. The arguments are those of every
    loss, see `policy_loss`; the temperatures are above 0.

    Equal to verl's `sapo`, which clamps the log ratio to 20 as we do, with its `tau_pos` and `tau_neg`.
    """
    require(tau_positive > 0, "tau_positive", tau_positive, "be above 0 (1.0 is usual)")
    require(tau_negative > 0, "tau_negative", tau_negative, "be above 0 (1.05 is usual)")
    up = torch.sigmoid(tau_positive * (tokens.ratio - 1)) * (4 / tau_positive)
    down = torch.sigmoid(tau_negative * (tokens.ratio - 1)) * (4 / tau_negative)
    return PolicyLoss(-torch.where(tokens.gain > 0, up, down) * tokens.gain, loss_stats(tokens))


@bundled_loss("dro", elementwise=True)
def dro(tokens: Tokens, *, beta: float = 1.0) -> PolicyLoss:
    """`-(A logp - beta / 2 (logp - old_logp)^2)`: a spring pulls each token to where it was sampled.

    Richemond et al. 2024 (Offline Regularised Reinforcement Learning for Large Language Models Alignment), the policy's
    part of DRO-V with the advantage in place of reward minus value, divided by its temperature, which is `beta`; the
    same objective is that of Kimi Team 2025 (Kimi k1.5), section 2.3. The gradient is
    `-(A - beta (logp - old_logp)) grad logp`: it is right for samples of any age, and does not vanish where A is 0.
    verl has no such loss. The arguments are those of every loss, see `policy_loss`; `beta` is at least 0.

    Difference from the papers: their square is of the whole sequence's log ratio, ours of each token's.
    """
    require(beta >= 0, "beta", beta, "be at least 0")
    spring = 0.5 * beta * tokens.difference.square()
    return PolicyLoss(spring - tokens.gain * tokens.logp, loss_stats(tokens))
