"""The clipped surrogate of PPO, with a bound for each side and the dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.trainers.algorithms.losses.policy_loss import PolicyLoss, Tokens, bundled_loss, loss_stats, require

__all__ = ["check_clip", "clipped_surrogate", "ppo_clip"]


@bundled_loss("ppo_clip", elementwise=True, silent_at_zero=True)
def ppo_clip(
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> PolicyLoss:
    """The negated clipped surrogate of PPO, with a bound for each side and the dual clip.

    With `r = exp(logp - old_logp)`, L = clip_low, H = clip_high and c = dual_clip, the objective is
    `min(r A, clip(r, 1 - L, 1 + H) A)`, and for A < 0 the larger of that and `c A`.
    Schulman et al. 2017 (PPO), eq. 7; L and H apart: Yu et al. 2025 (DAPO), section 3.1 "Clip-Higher"; the bound `c A`:
    Ye et al. 2020 (Mastering Complex Control in MOBA Games), the objective of dual-clip PPO.

    The arguments are those of every loss, see `policy_loss`. `clip_low` lies in (0, 1), `clip_high` above 0 (DAPO uses
    0.28), `dual_clip` above 1, or None for none. Where `old_logp` is what the engine sampled with, r is 1 on the first
    minibatch to the rounding between engine and learner.

    Difference from the papers: the log ratio is clamped to `MAX_LOG_RATIO` either way, and beyond it the gradient is 0.
    That only matters for A < 0 without dual clip, where the unclamped gradient would grow without bound. verl's
    `vanilla` has the same clamp and gives the same numbers.
    """
    check_clip(clip_low, clip_high, "0.2 and 0.28 are usual")
    above_one = dual_clip is None or dual_clip > 1
    require(above_one, "dual_clip", dual_clip, "be above 1 (3.0 is usual), or None for no bound")
    loss, clipped = clipped_surrogate(tokens.ratio, tokens.gain, clip_low, clip_high)
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        ceiling = -tokens.gain * dual_clip
        dual_clipped = (tokens.gain < 0) & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    return PolicyLoss(loss, loss_stats(tokens, clipped, dual_clipped))


def check_clip(clip_low: float, clip_high: float, usual: str) -> None:
    """Raises ConfigError for bounds of a ratio that cannot work."""
    require(0 < clip_low < 1, "clip_low", clip_low, f"lie between 0 and 1 ({usual})")
    require(clip_high > 0, "clip_high", clip_high, f"be above 0 ({usual})")


def clipped_surrogate(ratio: Tensor, gain: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, and a mask of where the clip is the smaller of the two."""
    plain = -gain * ratio
    bounded = -gain * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded > plain
    return torch.where(clipped, bounded, plain), clipped
