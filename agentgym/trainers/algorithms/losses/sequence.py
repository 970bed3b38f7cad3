"""Losses whose importance ratio belongs to a whole trajectory."""

from __future__ import annotations

import torch

from agentgym.trainers.algorithms.kl import MAX_LOG_RATIO
from agentgym.trainers.algorithms.losses.clipped import check_clip, clipped_surrogate
from agentgym.trainers.algorithms.losses.policy_loss import PolicyLoss, Tokens, bundled_loss, loss_stats, require
from agentgym.trainers.algorithms.sequences import Sequences

__all__ = ["geo_mean", "gspo"]

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Nats; the upper bound of GSPO's log ratio."""


@bundled_loss("gspo", silent_at_zero=True)
def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """`-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` with s the geometric mean of a trajectory's token ratios.

    Zheng et al. 2025 (Group Sequence Policy Optimization), eq. 5 and 7, in the token form of eq. 13 and 14:
    `s_t = sg(s) * pi(t) / sg(pi(t))` with `log s = mean(logp - old_logp)` over the trajectory's trained tokens, so
    every token has the value s and the gradient `-A_t s grad logp_t` of its own. The arguments are those of every
    loss, see `policy_loss`; the bounds are in ratios, and far smaller than PPO's, since a mean moves less than a token.

    Defaults: the paper's (section 5.1); verl's recipe has the same, its general default is 0.2. The aggregation is the
    run's: the paper's is `seq-mean-token-mean`, which verl's `gspo` takes whatever was asked for. Otherwise equal to
    verl's, its clamp of the log ratio at 10 from above included (beyond it the gradient is 0). A trajectory of several
    rows has one ratio, not one a row.
    """
    check_clip(clip_low, clip_high, "3e-4 and 4e-4 are usual")
    whole = Sequences.of(tokens.sequences, tokens.logp, "gspo")
    mean = whole.spread(whole.mean(tokens.difference.detach(), tokens.mask)).to(tokens.logp.dtype)
    own = tokens.logp - tokens.logp.detach()
    ratio = (own + mean).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    loss, clipped = clipped_surrogate(ratio, tokens.gain, clip_low, clip_high)
    return PolicyLoss(loss, loss_stats(tokens, clipped))


@bundled_loss("geo_mean", silent_at_zero=True)
def geo_mean(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    """`-A r` for every token of a trajectory, with r the geometric mean of its token ratios, each clipped.

    Zhao et al. 2025 (Geometric-Mean Policy Optimization), clipped token by token: with `d = logp - old_logp`,
    `log r = mean_t(sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)))` and A the trajectory's mean
    advantage. The gradient runs through the mean to every token that is not clipped. The arguments are those of every
    loss, see `policy_loss`; the bounds are in nats, above 0.

    Defaults: the paper's (e^-0.4, e^0.4); verl's general default is 0.2. Under `seq-mean-token-mean` the number is that
    of verl's `geo_mean`, but that verl also counts trajectories in which nothing is trained. Difference from both: the
    mean is clamped to `MAX_LOG_RATIO` either way, beyond which the gradient is 0; for A < 0 theirs has no bound above.
    """
    require(clip_low > 0, "clip_low", clip_low, "be above 0 (0.4 is usual)")
    require(clip_high > 0, "clip_high", clip_high, "be above 0 (0.4 is usual)")
    whole = Sequences.of(tokens.sequences, tokens.logp, "geo_mean")
    sign, bounded = tokens.gain.sign(), tokens.difference.clamp(-clip_low, clip_high)
    clipped = sign * bounded < sign * tokens.difference
    used = torch.where(clipped, bounded, tokens.difference) * sign.square()
    ratio_S = whole.mean(used, tokens.mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss_S = -whole.mean(tokens.gain, tokens.mask) * ratio_S
    loss = torch.where(tokens.mask, whole.spread(loss_S).to(tokens.logp.dtype), 0.0)
    return PolicyLoss(loss, loss_stats(tokens, clipped))
