"""The loss of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.trainers.algorithms.losses.policy_loss import check_shapes, require

__all__ = ["ValueLoss", "value_clip"]


@dataclass(frozen=True, eq=False)
class ValueLoss:
    """A loss per token, to be weighted and summed, with sums over trained tokens (which carry no gradient)."""

    loss: Tensor
    """The loss of each token, of the shape and type of `values`; 0 outside of the mask."""
    num_tokens: Tensor
    clipped: Tensor
    """Tokens whose clipped loss is the larger, which have no gradient."""


def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.5
) -> ValueLoss:
    """Half of the larger squared error: that of the value, or of the value clipped to `clip` around the old value.

    `1/2 max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)`: Schulman et al. 2017 (PPO) in OpenAI's baselines,
    described in Engstrom et al. 2020 (Implementation Matters in Deep Policy Gradients), section 3. `values` are the
    critic's, with gradient; `old_values` are those that the advantages were computed with; `returns` are the targets.
    All are in units of reward, of one shape, `[N]` or `[B, T]`. `mask` is True where a token is trained, and outside of
    it loss and gradient are exactly 0. `clip` is above 0; None gives half the squared error. Equal to verl's, whose
    factor 1/2 is outside of its mean.
    """
    require(clip is None or clip > 0, "clip", clip, "be above 0 (0.5 is usual), or None for no bound")
    check_shapes(mask, values=values, old_values=old_values, returns=returns)
    old, target = old_values.detach().to(values.dtype), returns.detach().to(values.dtype)
    error = torch.where(mask, values - target, 0.0)
    loss = 0.5 * error.square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        near = torch.where(mask, old + torch.where(mask, values - old, 0.0).clamp(-clip, clip) - target, 0.0)
        bounded = 0.5 * near.square()
        clipped = bounded > loss
        loss = torch.where(clipped, bounded, loss)
    return ValueLoss(loss, mask.sum(), clipped.sum())
