"""Estimators that compare each episode's whole return with those of the other episodes of its task.

Every trained token of an episode gets the episode's advantage, and its return is the episode's: `R_i`, the sum of all
its rewards. An episode of which nothing is trained still counts in the statistics of its group.

`n` is the size of a group. "Expectation" is that of the summed gradient `sum_t A_t grad log pi_t`, with the tokens
sampled from the policy, against the policy gradient `grad E[R]`.

Shapes: `B` episode, `T` token, `K` component of the reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.trainers.algorithms.advantages.credit import Credit, Groups, TrainedTokens, episode_groups, whiten
from agentgym.trainers.algorithms.advantages.registry import ADVANTAGES

__all__ = [
    "dr_grpo",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "no_advantage",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
]

STD_EPSILON = 1e-6


@ADVANTAGES.register("grpo")
def grpo(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    *,
    normalize_by_std: bool = True,
    epsilon: float = STD_EPSILON,
    allow_single: bool = False,
) -> Credit:
    """The return's distance from the group's mean, in standard deviations: `A_i = (R_i - mean(R)) / (std(R) + 1e-6)`.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, outcome supervision. `normalize_by_std=False` leaves the division
    out, which is `dr_grpo`. Shapes and errors: see `AdvantageEstimator`; rewards in any unit.

    Expectation: without the deviation `(n - 1) / n` of the policy gradient, since the mean holds the episode's own
    return; with it no multiple of the policy gradient (groups of small deviation weigh more).

    Differences from the paper: the deviation has the divisor n - 1, which it leaves open, and `epsilon` is added to
    it. From verl: none for groups of two and more, but equal returns give exactly 0; a group of one, which verl
    trains on its raw return, is refused or 0.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    advantage_B = groups.z_scores(return_B, epsilon) if normalize_by_std else groups.subtract_mean(return_B)
    return tokens.episode_credit(advantage_B, return_B)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, *, allow_single: bool = False) -> Credit:
    """The return's distance from the group's mean: `A_i = R_i - mean(R)`.

    Liu et al. 2025 (Understanding R1-Zero-Like Training), section 3.2: the division by the deviation weighs very easy
    and very hard tasks up, and the paper removes it. It also removes the division by the reply's length, which here is
    the choice of an aggregation: `--algo dr_grpo` takes `seq-mean-token-sum-norm`. Shapes and errors: see
    `AdvantageEstimator`.

    Expectation: `(n - 1) / n` of the policy gradient. Differences from verl's GRPO without deviation: a group of one is
    refused or 0.
    """
    return grpo(rewards_BT, mask_BT, groups_B, normalize_by_std=False, allow_single=allow_single)


@ADVANTAGES.register("none")
def no_advantage(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor) -> Credit:
    """No advantage for any token: rewards teach nothing, and the other terms of the loss do.

    For on-policy distillation (Agarwal et al. 2024; Lu et al. 2025), where a teacher's distribution at the tokens that
    the policy sampled is the only signal (`--algo distill`). Shapes and errors: see `AdvantageEstimator`.

    Expectation: 0. Differences from verl and TRL: they have a trainer of its own for this.
    """
    tokens, _, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single=True)
    return tokens.episode_credit(torch.zeros_like(return_B), return_B)


@ADVANTAGES.register("rloo")
def rloo(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, *, allow_single: bool = False) -> Credit:
    """The distance from the mean of the others: `A_i = R_i - mean_{j != i}(R_j) = n / (n - 1) (R_i - mean(R))`.

    Kool et al. 2019 (Buy 4 REINFORCE Samples, Get a Baseline for Free!); for language models Ahmadian et al. 2024
    (Back to Basics), "REINFORCE Leave-One-Out". Shapes and errors: see `AdvantageEstimator`.

    Expectation: the policy gradient (unbiased). Differences from verl: a group of one, which it trains on its raw
    return (on 0 in the vectorized form), is refused or 0.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    size_B = groups.size_N
    return tokens.episode_credit(groups.subtract_mean(return_B) * size_B / (size_B - 1).clamp(min=1), return_B)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, *, allow_single: bool = False
) -> Credit:
    """The return's distance from the group's mean, then whitened over all trained tokens of the batch.

    `A_i = (C_i - mean(C)) * rsqrt(var(C) + 1e-8)` with `C_i = R_i - mean_group(R)`; mean and variance (divisor the
    number of tokens - 1) count each token once, so longer episodes count more. Hu et al. 2025 (REINFORCE++), the
    variant with a group baseline. Shapes and errors: see `AdvantageEstimator`.

    Expectation: for episodes of equal length and a large batch, `(n - 1) / n` of the policy gradient over the
    standard deviation of C.

    Differences from verl: none for groups of two and more. A group of one is refused, or has an advantage of 0 and no
    part in the batch's statistics.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    whitened_BL = _whiten_tokens(groups.subtract_mean(return_B), groups, tokens)
    return tokens.credit(whitened_BL, return_B[:, None] + torch.zeros_like(whitened_BL))


@ADVANTAGES.register("opo")
def opo(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, *, allow_single: bool = False) -> Credit:
    """The return's distance from the mean weighted by length: `A_i = R_i - sum_j(l_j R_j) / sum_j(l_j)`.

    `l_j` is the number of trained tokens. Hao et al. 2025 (On-Policy RL with Optimal Reward Baseline): the baseline of
    least variance, `E[|grad log pi|^2 R] / E[|grad log pi|^2]`, where the squared norm grows with the length alone.
    Shapes and errors: see `AdvantageEstimator`.

    Expectation: the own return weighs `l_i / sum(l)` in its baseline, so `A_i` is `1 - l_i / sum(l)` of the distance
    from the weighted mean of the others: for equal lengths `(n - 1) / n` of the policy gradient.

    Differences from verl: a group of one is refused or 0.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    length_B = mask_BT.sum(-1).to(torch.float64)
    return tokens.episode_credit(groups.subtract_mean(return_B, length_B), return_B)


@ADVANTAGES.register("gpg")
def gpg(
    rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, *, norm: float = 1.0, allow_single: bool = False
) -> Credit:
    """The return's distance from the group's mean, scaled up by the share of returns that are not 0.

    `A_i = alpha (R_i - mean(R)) / norm` with `alpha = B / (number of episodes with R other than 0)`, the divisor at
    least 1. Chu et al. 2025 (GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning). Shapes and
    errors: see `AdvantageEstimator`.

    Expectation: `alpha (n - 1) / (n norm)` of the policy gradient for a large batch.

    Differences from the paper: there alpha counts the episodes of groups that have a gradient; here, as in verl,
    those with a return other than 0. From verl: a group of one is refused or 0. Alpha is of the whole batch, so parts
    of a batch must not be computed on their own.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    alpha = len(return_B) / max(1, int(return_B.count_nonzero()))
    return tokens.episode_credit(alpha * groups.subtract_mean(return_B) / norm, return_B)


@ADVANTAGES.register("grpo_passk")
def grpo_passk(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    *,
    normalize_by_std: bool = True,
    epsilon: float = STD_EPSILON,
    allow_single: bool = False,
) -> Credit:
    """The best episode of a group gets its lead over the second best, all others get 0.

    `A_i = (R_i - max_{j != i} R_j) / (std(R) + 1e-6)` for the single best, 0 otherwise and for ties. Tang et al. 2025
    (Optimizing Language Models for Inference Time Objectives using Reinforcement Learning), pass@k with k = n.
    Shapes and errors: see `AdvantageEstimator`; the deviation has the divisor n - 1.

    Expectation: without the deviation, summed over a group, the gradient of the expected best of n returns (unbiased);
    so 1/n of it as a mean over episodes. With the deviation no multiple of it.

    Differences from verl: a group of one is an error there too, here one that names `allow_single`, which gives 0.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    lead_B = _lead(return_B, groups)
    scale_B = groups.std(return_B) + epsilon if normalize_by_std else torch.ones_like(lead_B)
    return tokens.episode_credit(lead_B / scale_B, return_B)


@ADVANTAGES.register("gdpo")
def gdpo(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    components_BTK: Tensor,
    *,
    weights: Sequence[float] | None = None,
    allow_single: bool = False,
) -> Credit:
    """Each component of the reward compared with its group by itself, the weighted sum whitened over the batch.

    `C_i = sum_k w_k (R_ik - mean(R_k)) / (std(R_k) + 1e-6)`, then `A_i = (C_i - mean(C)) * rsqrt(var(C) + 1e-8)` over
    all trained tokens. Liu et al. 2026 (GDPO: Group reward-Decoupled Normalization Policy Optimization). `weights` has
    one number for each component, 1 when left out. One that an episode lacks is NaN: it is in no mean or deviation and
    adds nothing to the episode's sum, as in TRL. Shapes and errors: see `AdvantageEstimator`; `rewards_BT` gives the
    returns only. Raises ConfigError for another number of weights.

    Expectation: no multiple of the policy gradient, because of the deviations.

    Differences from the paper: the batch's mean and variance count tokens, as in verl, not episodes. From verl: a
    group of one is refused, or has an advantage of 0 and no part in the batch's statistics.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    component_BK = _component_returns(components_BTK, mask_BT)
    scale = [1.0] * component_BK.shape[1] if weights is None else weights
    if len(scale) != component_BK.shape[1]:
        raise ConfigError(f"{component_BK.shape[1]} components of the reward need as many weights, got {len(scale)}")
    combined_B = torch.zeros_like(return_B)
    for weight, component_B in zip(scale, component_BK.unbind(1), strict=True):
        is_number_B = ~component_B.isnan()
        score_B = torch.zeros_like(component_B)
        score_B[is_number_B] = Groups.of(groups_B[is_number_B]).z_scores(component_B[is_number_B], STD_EPSILON)
        combined_B = combined_B + weight * score_B
    whitened_BL = _whiten_tokens(combined_B, groups, tokens)
    return tokens.credit(whitened_BL, return_B[:, None] + torch.zeros_like(whitened_BL))


@ADVANTAGES.register("maxrl")
def maxrl(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, *, allow_single: bool = False) -> Credit:
    """The return's distance from the group's mean in units of that mean: `A_i = (R_i - mean(R)) / mean(R)`.

    0 throughout a group whose mean is 0. Tajwar et al. 2026 (Maximum Likelihood Reinforcement Learning), for rewards of
    0 and 1. Shapes and errors: see `AdvantageEstimator`; raises InvalidTrajectory for a negative return, whose group
    could have a mean below 0 and learn the opposite.

    Expectation: with success probability p, `sum_{k=1}^{n-1} grad pass@k / k = grad p (1 - (1 - p)^(n-1)) / p`: the
    first n - 1 terms of the series whose limit is `grad log p`. (The paper's estimator without control variate has n
    terms; the group without success, where the control variate is left out, costs the last one.)

    Differences: returns other than 0 and 1 are taken too; no epsilon is added to the mean.
    """
    tokens, groups, return_B = _episodes(rewards_BT, mask_BT, groups_B, allow_single)
    if bool((return_B < 0).any()):
        raise InvalidTrajectory(f"maxrl takes returns of at least 0 (it divides by their mean), got {return_B.min()}")
    mean_B = groups.total(return_B) / groups.size_N
    advantage_B = groups.subtract_mean(return_B) / torch.where(mean_B > 0, mean_B, 1.0)
    return tokens.episode_credit(advantage_B, return_B)


def _episodes(
    rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, allow_single: bool
) -> tuple[TrainedTokens, Groups, Tensor]:
    """The checked inputs, and each episode's whole return."""
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    return tokens, episode_groups(groups_B, tokens, allow_single), rewards_BT.detach().to(torch.float64).sum(-1)


def _whiten_tokens(numbers_B: Tensor, groups: Groups, tokens: TrainedTokens) -> Tensor:
    """The episodes' numbers at their trained tokens, whitened over the batch; 0 in groups of one, which stay out."""
    counted_BL = tokens.valid_BL & (groups.size_N > 1)[:, None]
    whitened_BL = torch.zeros_like(tokens.rewards_BL)
    whitened_BL[counted_BL] = whiten((whitened_BL + numbers_B[:, None])[counted_BL])
    return whitened_BL


def _lead(return_B: Tensor, groups: Groups) -> Tensor:
    """The best return less the second best at the best episode of each group, 0 at all others and in groups of one."""
    by_return = torch.argsort(return_B, stable=True)
    by_group = by_return[torch.argsort(groups.index_N[by_return], stable=True)]
    lead_B = torch.zeros_like(return_B)
    for_group = groups.index_N[by_group]
    follows = for_group[1:] == for_group[:-1]
    last = torch.cat([for_group[1:] != for_group[:-1], follows.new_ones(min(1, len(for_group)))])
    gap = torch.where(follows, return_B[by_group[1:]] - return_B[by_group[:-1]], 0.0)
    gap = torch.cat([gap.new_zeros(min(1, len(for_group))), gap])
    lead_B[by_group] = torch.where(last, gap, 0.0)
    return lead_B


def _component_returns(components_BTK: Tensor, mask_BT: Tensor) -> Tensor:
    fits = components_BTK.is_floating_point() and components_BTK.ndim == 3
    if not fits or components_BTK.shape[:2] != mask_BT.shape:
        raise InvalidTrajectory(
            f"components_BTK is float of shape {tuple(mask_BT.shape)} and one axis more, "
            f"got {components_BTK.dtype} of shape {tuple(components_BTK.shape)}"
        )
    if bool(components_BTK.isinf().any()):
        raise InvalidTrajectory("components_BTK is finite, or NaN where an episode lacks one; got an infinite number")
    return components_BTK.detach().to(torch.float64).sum(1)
