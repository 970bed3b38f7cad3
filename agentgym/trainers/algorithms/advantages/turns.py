"""Estimators whose steps are turns: each reply of an episode gets credit of its own.

A turn's reward is the sum of the rewards that arrived at its trained tokens, and of those that the environment paid
after it and before the next turn: a reward at an untrained token belongs to the turn before it. A turn of which nothing
is trained does not exist, and its reward belongs to the turn before. Every trained token of a turn has the turn's
advantage and return.

Shapes: `B` episode, `T` token, `L` trained token of its episode, `K` turn of its episode, `N` all turns of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.errors import InvalidTrajectory
from agentgym.trainers.algorithms.advantages.credit import Credit, Groups, TrainedTokens, episode_groups, whiten
from agentgym.trainers.algorithms.advantages.registry import ADVANTAGES
from agentgym.trainers.algorithms.advantages.returns import lambda_advantages

__all__ = ["gigpo", "return_batch_norm", "turn_gae", "turn_group", "turn_returns"]

STD_EPSILON = 1e-6


@ADVANTAGES.register("turn_returns")
def turn_returns(
    rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, turns_BT: Tensor, *, gamma: float = 1.0
) -> Credit:
    """The discounted reward to go of each turn: `A_k = G_k = r_k + gamma G_{k+1}`.

    Williams 1992 (REINFORCE) with turns as actions: what a turn does cannot change what was paid before it. Shapes and
    errors: see `AdvantageEstimator`; `groups_B` is not read. Raises InvalidTrajectory where a trained token has no turn
    or the turns of a row go back.

    Expectation: for gamma = 1 the policy gradient (unbiased), at the variance of a method without baseline.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    turns = _Turns.of(turns_BT, tokens)
    returns_BK = turns.to_go(gamma)
    return turns.credit(returns_BK, returns_BK)


@ADVANTAGES.register("return_batch_norm")
def return_batch_norm(
    rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, turns_BT: Tensor, *, gamma: float = 0.9
) -> Credit:
    """The discounted reward to go of each turn, normalized over all turns of the batch.

    `A_k = (G_k - mean(G)) * rsqrt(var(G) + 1e-8)`, every turn counting once whatever its length, the variance with the
    divisor (number of turns - 1). Liu et al. 2025 (GEM: A Gym for Agentic LLMs), section 3.2, eq. 4 (ReBN); gamma 0.9
    is its choice for games (table 3). Shapes and errors: those of `turn_returns`.

    Expectation: for gamma = 1 and a large batch the policy gradient over the standard deviation of G.

    Differences from the paper: 1e-8 is added to the variance.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    turns = _Turns.of(turns_BT, tokens)
    returns_BK = turns.to_go(gamma)
    return turns.credit(turns.unpack(whiten(returns_BK[turns.valid_BK])), returns_BK)


@ADVANTAGES.register("turn_group")
def turn_group(  # noqa: PLR0913  (three of the seven are keyword-only settings)
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    turns_BT: Tensor,
    *,
    gamma: float = 1.0,
    normalize_by_std: bool = True,
    allow_single: bool = False,
) -> Credit:
    """The reward to go of each turn, compared with the same turn of the group's other episodes.

    `A_ik = (G_ik - mean_j(G_jk)) / (std_j(G_jk) + 1e-6)` over the episodes j of the group that have a turn with the
    same number, `G` as in `turn_returns`. Zeng et al. 2025 (Reinforcing Multi-Turn Reasoning in LLM Agents via
    Turn-Level Credit Assignment), the group-relative form. A turn that no other episode of the group has gets 0.
    Shapes and errors: those of `turn_returns`, and a group of one raises ConfigError unless `allow_single`.

    Expectation: for gamma = 1 and `normalize_by_std=False`, where m episodes of the group have the turn, `(m - 1) / m`
    of the policy gradient of its tokens; with the deviation (divisor m - 1) no multiple of it.

    Differences from the paper: it sets a reward of the turn and one of the outcome against their groups and adds them
    up with a weight; here both are in the reward to go.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    episode_groups(groups_B, tokens, allow_single)
    turns = _Turns.of(turns_BT, tokens)
    returns_BK = turns.to_go(gamma)
    group_N, number_N, return_N = turns.pack(groups_B[:, None]), turns.pack(turns.number_BK), turns.pack(returns_BK)
    advantage_N = _compare_in_group(return_N, Groups.of(group_N, number_N), normalize_by_std)
    return turns.credit(turns.unpack(advantage_N), returns_BK)


@ADVANTAGES.register("gigpo")
def gigpo(  # noqa: PLR0913  (four of the nine are keyword-only settings)
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    turns_BT: Tensor,
    states_BT: Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize_by_std: bool = True,
    allow_single: bool = False,
) -> Credit:
    """The episode against its group, plus each turn against all turns that its group sampled in the same state.

    `A_ik = A^E_i + step_weight A^S_ik`; `A^E = (R_i - mean(R)) / (std(R) + 1e-6)` on undiscounted returns, and
    `A^S = (G_ik - mean(G)) / (std(G) + 1e-6)` on discounted rewards to go, over the turns of the group's episodes whose
    state has the same id (an episode that comes back to a state counts each time). A state that was met once, or has a
    negative id, adds 0. Feng et al. 2025 (Group-in-Group Policy Optimization), section 4;
    `normalize_by_std=False` is its form without deviation. The returns are `G`. A turn's state is that of its first
    trained token. Shapes and errors: those of `turn_group`.

    Expectation: for gamma = 1 without deviation, where every state is met by m of n episodes, once in each,
    `(n - 1) / n + step_weight (m - 1) / m` of the policy gradient.

    Differences from the authors' code: none in groups of two and more; their group of one trains on its raw return.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    groups = episode_groups(groups_B, tokens, allow_single)
    turns = _Turns.of(turns_BT, tokens)
    return_B = rewards_BT.detach().to(torch.float64).sum(-1)
    episode_B = _compare_in_group(return_B, groups, normalize_by_std)
    returns_BK = turns.to_go(gamma)
    state_N = turns.pack(turns.first(tokens.take_ids(states_BT, "states_BT")))
    anchors = Groups.of(turns.pack(groups_B[:, None]), state_N)
    step_N = torch.where(state_N >= 0, _compare_in_group(turns.pack(returns_BK), anchors, normalize_by_std), 0.0)
    return turns.credit(episode_B[:, None] + step_weight * turns.unpack(step_N), returns_BK)


@ADVANTAGES.register("turn_gae")
def turn_gae(  # noqa: PLR0913  (three of the nine are keyword-only settings)
    rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    values_BT: Tensor,
    turns_BT: Tensor,
    bootstrap_B: Tensor | None = None,
    *,
    gamma: float = 0.99,
    lam: float = 0.9,
    whiten_advantages: bool = True,
) -> Credit:
    """Generalized advantage estimation whose steps are turns, whitened over the trained tokens of the batch.

    `delta_k = r_k + gamma V_{k+1} - V_k`, `A_k = delta_k + gamma lam A_{k+1}`, where `V_k` is the critic's value at
    the turn's first trained token, read before the reply and after everything the environment said, and
    `bootstrap_B` is that after the last turn. The returns are `A_k + V_k` before whitening. Li et al. 2025 (Turn-PPO:
    Turn-Level Advantage Estimation with PPO), whose gamma 0.99 and lambda 0.9 these are. Shapes and errors: those of
    `turn_returns`; values in the unit of the rewards.

    Expectation: that of `gae`, with turns for tokens: unbiased for gamma = lam = 1 without whitening, and for lam < 1
    biased by the critic's errors at later turns.

    Differences from the paper: the whitening over trained tokens, as in `gae`.
    """
    tokens = TrainedTokens.of(rewards_BT, mask_BT)
    turns = _Turns.of(turns_BT, tokens)
    values_BK = turns.first(tokens.take(values_BT, "values_BT"))
    end_B = tokens.per_row(bootstrap_B, "bootstrap_B")
    advantages_BK = lambda_advantages(turns.rewards_BK, values_BK, turns.valid_BK, end_B, gamma=gamma, lam=lam)
    credit_BL, returns_BK = turns.spread(advantages_BK), advantages_BK + values_BK
    if whiten_advantages:
        credit_BL[tokens.valid_BL] = whiten(credit_BL[tokens.valid_BL])
    return tokens.credit(credit_BL, turns.spread(returns_BK))


def _compare_in_group(numbers_N: Tensor, groups: Groups, normalize_by_std: bool) -> Tensor:
    return groups.z_scores(numbers_N, STD_EPSILON) if normalize_by_std else groups.subtract_mean(numbers_N)


@dataclass(frozen=True, eq=False)
class _Turns:
    """The turns of each row, moved to its front in their order: `K` is the largest number of them in a row.

    Example: trained tokens of turns `[[0, 0, 2]]` with rewards `[[1, 2, 4]]` make up turns `valid_BK` `[[T, T]]`,
    `number_BK` `[[0, 2]]` and `rewards_BK` `[[3, 4]]`; `step_BL` is `[[0, 0, 1]]`, `first_BK` `[[0, 2]]`.
    """

    tokens: TrainedTokens
    step_BL: Tensor
    """int64; the index of the token's turn in its row, 0 after the row's end."""
    first_BK: Tensor
    """int64; the turn's first trained token, 0 after the row's end."""
    valid_BK: Tensor
    number_BK: Tensor
    rewards_BK: Tensor

    @classmethod
    def of(cls, turns_BT: Tensor, tokens: TrainedTokens) -> _Turns:
        number_BL = tokens.take_ids(turns_BT, "turns_BT")
        valid_BL = tokens.valid_BL
        if bool((number_BL[valid_BL] < 0).any()):
            raise InvalidTrajectory("every trained token belongs to a turn, got one whose turn is negative")
        change_BL = (number_BL.diff(dim=-1) != 0) & valid_BL[:, 1:]
        if bool((number_BL.diff(dim=-1)[change_BL] < 0).any()):
            raise InvalidTrajectory(
                "the turns of a row count up, got a trained token whose turn is before the last one"
            )
        opens_BL = torch.cat([valid_BL[:, :1], change_BL], dim=-1)
        count_B = opens_BL.sum(-1)
        max_turns = int(count_B.max()) if len(count_B) else 0
        valid_BK = torch.arange(max_turns, device=count_B.device) < count_B[:, None]
        first_BK = torch.argsort((~opens_BL).to(torch.uint8), dim=-1, stable=True)[:, :max_turns] * valid_BK
        step_BL = torch.where(valid_BL, opens_BL.cumsum(-1) - 1, 0)
        rewards_BK = torch.zeros(valid_BK.shape, dtype=torch.float64, device=count_B.device)
        rewards_BK = rewards_BK.scatter_add(1, step_BL, tokens.rewards_BL)
        return cls(tokens, step_BL, first_BK, valid_BK, number_BL.gather(1, first_BK), rewards_BK)

    def to_go(self, gamma: float) -> Tensor:
        """The discounted reward to go of each turn, `[B, K]`."""
        nothing_BK, nothing_B = torch.zeros_like(self.rewards_BK), self.tokens.per_row(None, "bootstrap_B")
        return lambda_advantages(self.rewards_BK, nothing_BK, self.valid_BK, nothing_B, gamma=gamma, lam=1.0)

    def first(self, numbers_BL: Tensor) -> Tensor:
        """The numbers at the first trained token of each turn, `[B, K]`."""
        return numbers_BL.gather(1, self.first_BK)

    def pack(self, numbers_BK: Tensor) -> Tensor:
        """The turns of all rows end to end, `[N]`."""
        return numbers_BK.expand_as(self.valid_BK)[self.valid_BK]

    def unpack(self, numbers_N: Tensor) -> Tensor:
        """The inverse of `pack`, 0 after each row's end."""
        numbers_BK = torch.zeros_like(self.rewards_BK)
        numbers_BK[self.valid_BK] = numbers_N
        return numbers_BK

    def spread(self, numbers_BK: Tensor) -> Tensor:
        """Each turn's number at each of its trained tokens, `[B, L]`."""
        return numbers_BK.gather(1, self.step_BL)

    def credit(self, advantages_BK: Tensor, returns_BK: Tensor) -> Credit:
        return self.tokens.credit(self.spread(advantages_BK), self.spread(returns_BK))
