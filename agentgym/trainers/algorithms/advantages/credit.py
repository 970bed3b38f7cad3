"""The result of an estimator, and the helpers that all estimators share.

The helpers are the trained tokens without the holes between them, and statistics of groups and of the batch.

Shapes: `B` episode, `T` token, `L` trained token of its episode, `N` members of groups (episodes, or turns).
All statistics are float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.trainers.algorithms.sequences import Sequences

__all__ = ["Credit", "Groups", "TrainedTokens", "check_rewards", "episode_groups", "whiten"]

WHITEN_EPSILON = 1e-8


class Credit(NamedTuple):
    """The advantage of each token and the target that a critic would be fitted to.

    Both have the shape and dtype of the rewards, are 0 wherever a token is not trained, never NaN, and carry no
    gradient. Example: `reinforce_plus_plus` of rewards `[[0, 0, 1]]`, mask `[[T, F, T]]` and gamma 0.5 has
    `returns_BT` `[[0.5, 0, 1]]`.
    """

    advantages_BT: Tensor
    returns_BT: Tensor
    """The reward to go, or the whole return at every token where the estimator works on whole episodes."""


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The trained tokens of each row, moved to its front in their order: `L` is the largest number of them in a row.

    Example: mask `[[F, T, F, T], [T, F, F, F]]` with rewards `[[0, 0, 3, 4], [0, 0, 0, 5]]` has `place_BL`
    `[[1, 3], [0, *]]`, `valid_BL` `[[T, T], [T, F]]` and `rewards_BL` `[[3, 4], [5, 0]]`.
    """

    mask_BT: Tensor
    place_BL: Tensor
    valid_BL: Tensor
    rewards_BL: Tensor
    """float64; a reward at an untrained token counts at the nearest trained token before it, or at the first one. A row
    with nothing trained holds nothing."""
    dtype: torch.dtype

    @classmethod
    def of(cls, rewards_BT: Tensor, mask_BT: Tensor) -> TrainedTokens:
        """Packs the trained tokens; raises InvalidTrajectory unless both are `[B, T]`, finite float and bool."""
        check_rewards(rewards_BT, mask_BT)
        count_B = mask_BT.sum(-1)
        longest = int(count_B.max()) if len(count_B) else 0
        place_BL = torch.argsort((~mask_BT).to(torch.uint8), dim=-1, stable=True)[:, :longest]
        valid_BL = torch.arange(longest, device=mask_BT.device) < count_B[:, None]
        rewards_BL = carry(rewards_BT.detach().to(torch.float64), mask_BT)[:, :longest]
        return cls(mask_BT, place_BL, valid_BL, rewards_BL, rewards_BT.dtype)

    @property
    def to_go_BL(self) -> Tensor:
        """The sum of the rewards from each trained token onwards."""
        return self.rewards_BL.flip(-1).cumsum(-1).flip(-1) * self.valid_BL

    def take(self, numbers_BT: Tensor, name: str) -> Tensor:
        """The float64 `[B, L]` of a tensor that is given by token, 0 after each row's end.

        Raises InvalidTrajectory, naming it, when it has another shape or is not finite at a trained token.
        """
        if not numbers_BT.is_floating_point() or numbers_BT.shape != self.mask_BT.shape:
            raise InvalidTrajectory(
                f"{name} is float of shape {tuple(self.mask_BT.shape)}, got {_format_tensor(numbers_BT)}"
            )
        number_BL = numbers_BT.detach().to(torch.float64).gather(1, self.place_BL)
        number_BL = torch.where(self.valid_BL, number_BL, 0.0)
        if not bool(number_BL.isfinite().all()):
            raise InvalidTrajectory(f"{name} is finite at trained tokens, got {_first_not_finite(number_BL)}")
        return number_BL

    def take_ids(self, ids_BT: Tensor, name: str) -> Tensor:
        """The int64 `[B, L]` of ids that are given by token, -1 after each row's end; errors as for `take`."""
        if ids_BT.dtype != torch.int64 or ids_BT.shape != self.mask_BT.shape:
            raise InvalidTrajectory(
                f"{name} is int64 of shape {tuple(self.mask_BT.shape)}, got {_format_tensor(ids_BT)}"
            )
        return torch.where(self.valid_BL, ids_BT.gather(1, self.place_BL), -1)

    def per_row(self, numbers_B: Tensor | None, name: str) -> Tensor:
        """The float64 `[B]` of a tensor that is given by row, zeros for None; errors as for `take`."""
        rows = self.mask_BT.shape[:1]
        if numbers_B is None:
            return torch.zeros(rows, dtype=torch.float64, device=self.mask_BT.device)
        if not numbers_B.is_floating_point() or numbers_B.shape != rows:
            raise InvalidTrajectory(f"{name} is float of shape {tuple(rows)}, got {_format_tensor(numbers_B)}")
        if not bool(numbers_B.isfinite().all()):
            raise InvalidTrajectory(f"{name} is finite, got {_first_not_finite(numbers_B)}")
        return numbers_B.detach().to(torch.float64)

    def credit(self, advantages_BL: Tensor, returns_BL: Tensor) -> Credit:
        """The result by token, with each number back at its token's position."""
        return Credit(self._spread(advantages_BL), self._spread(returns_BL))

    def episode_credit(self, advantages_B: Tensor, returns_B: Tensor) -> Credit:
        """The result where every trained token of a row has the row's numbers."""
        zeros_BL = torch.zeros_like(self.rewards_BL)
        return self.credit(zeros_BL + advantages_B[:, None], zeros_BL + returns_B[:, None])

    def _spread(self, numbers_BL: Tensor) -> Tensor:
        spread_BT = torch.zeros(self.mask_BT.shape, dtype=self.dtype, device=self.mask_BT.device)
        spread_BT[self.mask_BT] = numbers_BL[self.valid_BL].to(self.dtype)
        return spread_BT


def carry(rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The rewards `[B, T]` by the number of the trained token that they count at.

    That is the nearest trained token at or before the one where the reward arrived, or the first one. A row with
    nothing trained has zeros.
    """
    nearest_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    carried_BT = torch.zeros_like(rewards_BT).scatter_add(1, nearest_BT, rewards_BT)
    return torch.where(mask_BT.any(-1, keepdim=True), carried_BT, 0.0)


@dataclass(frozen=True, eq=False)
class Groups:
    """The group that each of N members belongs to, with the statistics of its group at every member."""

    members: Sequences

    @classmethod
    def of(cls, *ids_N: Tensor) -> Groups:
        """Members with equal ids belong together; with several ids, those for which all of them are equal."""
        return cls(Sequences.by_ids(*ids_N))

    @property
    def index_N(self) -> Tensor:
        """int64; the number of the member's group, from 0."""
        return self.members.index_N

    @property
    def size_N(self) -> Tensor:
        """float64; members of the member's group."""
        return self.total(torch.ones_like(self.index_N))

    def total(self, numbers_N: Tensor) -> Tensor:
        """The sum over the member's group; further axes are kept."""
        shape = (self.members.num_sequences, *numbers_N.shape[1:])
        totals = torch.zeros(shape, dtype=torch.float64, device=numbers_N.device)
        return totals.index_add(0, self.index_N, numbers_N.to(torch.float64))[self.index_N]

    def subtract_mean(self, numbers_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """The distance from the group's mean, weighted where weights are given; exactly 0 where all are equal."""
        weights_N = torch.ones_like(numbers_N) if weights_N is None else weights_N
        above_N = numbers_N - self.members.spread(self.members.min(numbers_N))
        return above_N - self.total(weights_N * above_N) / self.total(weights_N).clamp(min=torch.finfo().tiny)

    def std(self, numbers_N: Tensor) -> Tensor:
        """The standard deviation with the divisor n - 1, 0 in a group of one."""
        return (self.total(self.subtract_mean(numbers_N).square()) / (self.size_N - 1).clamp(min=1)).sqrt()

    def z_scores(self, numbers_N: Tensor, epsilon: float) -> Tensor:
        """The distance from the group's mean, divided by `std + epsilon`."""
        return self.subtract_mean(numbers_N) / (self.std(numbers_N) + epsilon)


def episode_groups(groups_B: Tensor, tokens: TrainedTokens, allow_single: bool) -> Groups:
    """The groups of the episodes; raises ConfigError for a group of one unless `allow_single`."""
    rows = tuple(tokens.mask_BT.shape[:1])
    if groups_B.dtype != torch.int64 or tuple(groups_B.shape) != rows:
        raise InvalidTrajectory(f"groups_B is int64 of shape {rows}, got {_format_tensor(groups_B)}")
    groups = Groups.of(groups_B)
    lone_B = groups.size_N == 1
    if not allow_single and bool(lone_B.any()):
        raise ConfigError(
            f"group {int(groups_B[lone_B][0])} is a group of one, which has no baseline, so its advantage is always 0: "
            "set the group size to 2 or more, or pass allow_single=True where that is meant"
        )
    return groups


def whiten(numbers_N: Tensor) -> Tensor:
    """`(x - mean) * rsqrt(var + 1e-8)`, the variance with the divisor n - 1; zeros where all are equal."""
    if numbers_N.numel() == 0:
        return numbers_N
    above_N = numbers_N - numbers_N.min()
    centred_N = above_N - above_N.mean()
    variance = centred_N.square().sum() / max(1, numbers_N.numel() - 1)
    return centred_N * (variance + WHITEN_EPSILON).rsqrt()


def check_rewards(rewards_BT: Tensor, mask_BT: Tensor) -> None:
    """Raises InvalidTrajectory unless rewards and mask are `[B, T]`, finite float and bool."""
    fits = rewards_BT.ndim == 2 and rewards_BT.shape == mask_BT.shape
    if not fits or not rewards_BT.is_floating_point() or mask_BT.dtype != torch.bool:
        raise InvalidTrajectory(
            "rewards are float and the mask is bool (`mask.bool()` of 0 and 1), both by episode and token; "
            f"got {_format_tensor(rewards_BT)} and {_format_tensor(mask_BT)}"
        )
    if not bool(rewards_BT.isfinite().all()):
        raise InvalidTrajectory(f"rewards are finite, got {_first_not_finite(rewards_BT)}")


def _format_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _first_not_finite(tensor: Tensor) -> str:
    """The first number that is not finite, with its index."""
    index = tuple((~tensor.isfinite()).nonzero()[0].tolist())
    return f"{float(tensor[index])} at {index}"
