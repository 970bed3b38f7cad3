"""Estimators on the reward to go of each token: with a critic, a batch's mean, a greedy episode or others of the group.

A token is credited with the rewards that arrived at it and later. All sums and discounts run over trained tokens only,
as if the tokens of the environment between them were not there. Where `gamma` is 1, a reward counts in full at every
token before it.

Shapes: `B` episode, `T` token, `L` trained token of its episode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.trainers.algorithms.advantages.credit import Credit, TrainedTokens, episode_groups, whiten
from agentgym.trainers.algorithms.advantages.registry import ADVANTAGES

__all__ = [
    "gae",
    "lambda_advantages",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "remax",
    "tir_optimal_token_baseline",
]

BASELINE_EPSILON = 1e-8


@ADVANTAGES.register("gae")
def gae(  # noqa: PLR0913  (three of the eight are keyword-only settings)
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    values_BT: Tensor,
    bootstrap_B: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool = True,
) -> Credit:
    """Generalized advantage estimation over trained tokens, whitened over the batch.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, where t + 1 is the next trained token,
    and after the last one V is `bootstrap_B` and A is 0. The returns are `A_t + V_t` before whitening. Schulman et al.
    2015 (High-Dimensional Continuous Control Using Generalized Advantage Estimation), eq. 16; the whitening (see
    `whiten`) is that of PPO's implementations. Shapes and errors: see `AdvantageEstimator`; values in the unit of the
    rewards, `groups_B` is not read.

    Expectation: for gamma = lam = 1 without whitening the policy gradient, whatever the values (unbiased); a
    bootstrapped value counts as a reward. For lam < 1 an error e of the critic adds
    `gamma (1 - lam) sum_k (gamma lam)^k e_{t+1+k}` to `A_t`: biased by that, and unbiased where the critic is right.

    Differences from the paper: the whitening. From verl: a reward at a token that is not trained, which it loses, is
    carried to the nearest trained one; a truncated episode bootstraps; one single token in the batch is whitened to
    0, where verl raises.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    values_BL = tokens.take(values_BT, "values_BT")
    end_B = tokens.per_row(bootstrap_B, "bootstrap_B")
    advantages_BL = lambda_advantages(tokens.rewards_BL, values_BL, tokens.valid_BL, end_B, gamma=gamma, lam=lam)
    returns_BL = advantages_BL + values_BL
    if whiten_advantages:
        advantages_BL = _whiten_over_batch(advantages_BL, tokens)
    return tokens.credit(advantages_BL, returns_BL)


def lambda_advantages(
    rewards_BL: Tensor, values_BL: Tensor, valid_BL: Tensor, bootstrap_B: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """The recursion of `gae` over steps that are packed at the front of their rows; 0 after a row's end.

    With values of 0, no bootstrap and lam = 1 it computes discounted returns to go.
    """
    advantages_BL = torch.zeros_like(rewards_BL)
    running_B, next_value_B = torch.zeros_like(bootstrap_B), bootstrap_B
    for step in reversed(range(rewards_BL.shape[1])):
        value_B, valid_B = values_BL[:, step], valid_BL[:, step]
        delta_B = rewards_BL[:, step] + gamma * next_value_B - value_B
        running_B = torch.where(valid_B, delta_B + gamma * lam * running_B, running_B)
        next_value_B = torch.where(valid_B, value_B, next_value_B)
        advantages_BL[:, step] = torch.where(valid_B, running_B, 0.0)
    return advantages_BL


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, *, gamma: float = 1.0) -> Credit:
    """The discounted reward to go of each trained token, whitened over the batch.

    `G_t = r_t + gamma G_{t+1}` over trained tokens, `A_t = (G_t - mean(G)) * rsqrt(var(G) + 1e-8)` over all of the
    batch (see `whiten`). Hu et al. 2025 (REINFORCE++). A penalty on the divergence belongs in `rewards_BT`. Shapes and
    errors: see `AdvantageEstimator`; `groups_B` is not read.

    Expectation: for gamma = 1 and a large batch the policy gradient over the standard deviation of G.

    Differences from verl: a reward at a token that is not trained, which it loses, is carried to the nearest trained
    one, and is discounted from there.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    nothing_BL, nothing_B = torch.zeros_like(tokens.rewards_BL), tokens.per_row(None, "bootstrap_B")
    returns_BL = lambda_advantages(tokens.rewards_BL, nothing_BL, tokens.valid_BL, nothing_B, gamma=gamma, lam=1.0)
    return tokens.credit(_whiten_over_batch(returns_BL, tokens), returns_BL)


@ADVANTAGES.register("remax")
def remax(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, greedy_B: Tensor) -> Credit:
    """The reward to go of each trained token less the reward of a greedy episode of the same task: `A_t = G_t - b`.

    Li et al. 2023 (ReMax), Algorithm 1. `greedy_B` is in the unit of the rewards. Shapes and errors: see
    `AdvantageEstimator`; `groups_B` is not read.

    Expectation: the policy gradient (unbiased), since the greedy episode does not depend on the sampled one.

    Differences from verl: a reward at a token that is not trained, which it loses, is carried to the nearest trained
    one.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    returns_BL = tokens.to_go_BL
    return tokens.credit(returns_BL - tokens.per_row(greedy_B, "greedy_B")[:, None], returns_BL)


@ADVANTAGES.register("optimal_token_baseline")
def optimal_token_baseline(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    proxy_BT: Tensor,
    *,
    zero_tail: bool = False,
    allow_single: bool = False,
) -> Credit:
    """The reward to go less, at each token, the group's mean weighted by how much gradient was spent so far.

    `A_t = G_t - b_t` with `b_t = sum_j(W_jt G_jt) / (sum_j(W_jt) + 1e-8)` over the episodes j of the group that have a
    t-th trained token, and `W_t = sum_{s <= t} proxy_s`. Li et al. 2026 (The Optimal Token Baseline), with the
    logit-gradient proxy. With `zero_tail` the tokens that only the longest episode of the group has get no baseline,
    so their raw reward to go; without it their own return is all their baseline holds: 0 but for 1e-8. Shapes and
    errors: see `AdvantageEstimator`; `proxy_BT` lies in [0, 2].

    Expectation: the own return weighs `W_it / sum_j(W_jt)` in its baseline, so `A_it` is `1 - W_it / sum_j(W_jt)` of
    the distance from the weighted mean of the others: biased toward 0 by about 1/n.

    Differences from the paper and verl: no importance weights of the sampler enter W. From verl: a reward at a token
    that is not trained, which it loses, is carried; tokens are aligned by their number among the trained ones, so
    that holes in the mask change nothing (in verl only `tir_optimal_token_baseline` does that); a group of one, which
    it trains on its raw return, is refused or 0, and so is an episode whose group has no other trained token.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    groups = episode_groups(groups_B, tokens, allow_single)
    weight_BL = tokens.take(proxy_BT, "proxy_BT").cumsum(-1) * tokens.valid_BL
    returns_BL = tokens.to_go_BL
    baseline_BL = groups.total(weight_BL * returns_BL) / (groups.total(weight_BL) + BASELINE_EPSILON)
    if zero_tail:
        reached_BL = groups.total(tokens.valid_BL.to(torch.float64))
        baseline_BL = torch.where(reached_BL > 1, baseline_BL, 0.0)
    compared_B = groups.total(mask_BT.any(-1).to(torch.float64)) > 1
    return tokens.credit((returns_BL - baseline_BL) * compared_B[:, None], returns_BL)


@ADVANTAGES.register("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    proxy_BT: Tensor,
    *,
    zero_tail: bool = True,
    allow_single: bool = False,
) -> Credit:
    """`optimal_token_baseline` for episodes of many turns: tokens are aligned by their number among the trained ones.

    Li et al. 2026 (The Optimal Token Baseline), tool-integrated reasoning. Both forms align so here; this one differs
    in its default of `zero_tail`, which is verl's. Everything else is documented there.
    """
    return optimal_token_baseline(
        rewards_BT, mask_BT, groups_B, proxy_BT, zero_tail=zero_tail, allow_single=allow_single
    )


def _whiten_over_batch(numbers_BL: Tensor, tokens: TrainedTokens) -> Tensor:
    whitened_BL = torch.zeros_like(numbers_BL)
    whitened_BL[tokens.valid_BL] = whiten(numbers_BL[tokens.valid_BL])
    return whitened_BL
