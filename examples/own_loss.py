"""A policy loss of one's own, for `agentgym train --env TextGame-v0 --learner.loss examples/own_loss.py:soft_clip`."""

from __future__ import annotations

from torch import Tensor

from agentgym.trainers import PolicyLoss, Tokens, loss_stats, traits


@traits(elementwise=True, silent_at_zero=True)
def soft_clip(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequences: Tensor | None = None,
    width: float = 0.2,
) -> PolicyLoss:
    """`-(1 + width tanh((r - 1) / width)) A` with `r = exp(logp - old_logp)`: PPO's surrogate with a smooth bound.

    The slope at r = 1 is that of the policy gradient, and falls to 0 as the ratio leaves `1 - width` to `1 + width`.
    `--learner.loss-settings width=0.3` sets another width.
    """
    tokens = Tokens.of(logp, old_logp, advantages, mask)
    distance = tokens.ratio - 1
    loss = -(1 + width * (distance / width).tanh()) * tokens.gain
    return PolicyLoss(loss, loss_stats(tokens, clipped=distance.abs() > width))
