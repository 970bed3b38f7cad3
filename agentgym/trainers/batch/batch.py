"""Rows as packed, padding-free tensors, aligned to their TARGET tokens; see `trained_row.py`.

Shapes: `N` packed tokens, `B` row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.model.packed_layout import MIN_SHARED, shared_length
from agentgym.trainers.algorithms.aggregation import RowCounts, StepTotals, turn_weights
from agentgym.trainers.batch.batch_faults import batch_faults
from agentgym.trainers.batch.credits import Advantages, GroupCredit, flat_credit
from agentgym.trainers.batch.trained_row import DTYPES, TrainedRow
from agentgym.trajectory import Group, Row, Trajectory

__all__ = ["TrainingBatch", "batch_of_rows", "build_batch", "plain_batch"]


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Rows laid end to end, `N = sum(seqlens)`; the step's loss is `sum(weight_N * loss_N)` over all of its parts.

    Example: one row with prompt (1, 2), reply (3, 4), environment (5), reply (6), advantage 0.5, `token-mean`:

        ids_N        1    2    3    4    5
        target_N     2    3    4    5    6
        position_N   0    1    2    3    4        seqlens (5,)
        mask_N       F    T    T    F    T
        advantage_N  0   .5   .5    0   .5
        weight_N     0  1/3  1/3    0  1/3
    """

    ids_N: Tensor
    """int64; the input token, which is the token before the target."""
    target_N: Tensor
    """int64; the token whose probability counts."""
    position_N: Tensor
    """int64; the input token's index in its row, from 0."""
    mask_N: Tensor
    """bool; True where the target is trained. The tensors below are 0 (the versions -1) elsewhere."""
    sampled_logp_N: Tensor
    """float32; the target's logprob when it was sampled, as the engine reported it."""
    old_logp_N: Tensor
    """float32; the logprob that the loss takes its ratio against: the same, unless an off-policy correction sets it."""
    correction_N: Tensor
    """float32; the factor by which an off-policy correction multiplies the policy loss; 1 without one."""
    advantage_N: Tensor
    """float32; the target's advantage."""
    return_N: Tensor
    """float32; the target of the critic's value; 0 without a critic."""
    old_value_N: Tensor
    """float32; the critic's value before the step; 0 without a critic."""
    weight_N: Tensor
    """float32; the target's share in the step's loss, see `aggregation`."""
    policy_version_N: Tensor
    """int64; the weights that sampled the target."""
    reply_version_N: Tensor
    """int64; the weights that the target's reply began with: older ones if it continued over a weight update."""
    row_N: Tensor
    """int64; the row's number among all rows of the step's groups, counted before any was left out."""
    trajectory_N: Tensor
    """int64; the trajectory's number among all trajectories of the step's groups, counted before any was left out."""
    seqlens: tuple[int, ...]
    """The number of entries of each row, `[B]`, each at least 1."""
    totals: StepTotals
    """The denominators of the whole step; the same in every part of it."""
    experts_NRK: Tensor | None = None
    """int16 `[N, R, K]`; the experts that each of R routers gave the input token to, -1 where that is not known."""
    reference_logp_N: Tensor | None = None
    """float32; the target's logprob under the reference of the KL term, if ranks of its own have computed it."""
    divides_trajectories: bool = True
    """False keeps the rows of a trajectory in one micro-batch, for losses that compare them."""

    def __post_init__(self) -> None:
        for name, tensor in self._tensors().items():
            if tensor.shape != (sum(self.seqlens),):
                raise InvalidTrajectory(f"{name} has shape {tuple(tensor.shape)}, seqlens say ({sum(self.seqlens)},)")
            if tensor.dtype != DTYPES[name]:
                raise InvalidTrajectory(f"{name} is {tensor.dtype}, wanted {DTYPES[name]}")
        if any(length < 1 for length in self.seqlens):
            raise InvalidTrajectory("a row of a batch holds at least one target")
        if self.ids_N.device.type != "cpu":  # it was checked before it was moved, and each look would wait for a GPU
            return
        for fault, message in batch_faults(self._tensors(), self.seqlens):
            if bool(fault):
                raise InvalidTrajectory(message)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in DTYPES}

    @property
    def num_rows(self) -> int:
        """The number of rows of this part."""
        return len(self.seqlens)

    @property
    def num_tokens(self) -> int:
        """The number of entries of this part, trained or not."""
        return sum(self.seqlens)

    @property
    def num_trained_tokens(self) -> int:
        """The number of trained targets of this part; `totals.num_trained_tokens` counts the whole step."""
        return int(self.on_cpu.mask_N.sum())

    @property
    def row_weight_B(self) -> Tensor:
        """The share of each row in the step's loss, `[B]`."""
        rows = self.weight_N.split(self.seqlens)
        return torch.stack([weight_N.sum() for weight_N in rows]) if rows else self.weight_N

    @property
    def cu_seqlens(self) -> Tensor:
        """The row boundaries, int32 `[B + 1]`, as variable-length attention takes them: 0, ..., N."""
        return torch.tensor([0, *accumulate(self.seqlens)], dtype=torch.int32, device=self.ids_N.device)

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The same batch on another device."""
        moved = self._map_tensors(lambda tensor: tensor.to(device), self.seqlens)
        moved.__dict__["_origin"] = self.on_cpu
        return moved

    @property
    def on_cpu(self) -> TrainingBatch:
        """The batch on the CPU: the one that was moved, which no GPU is waited for."""
        if self.ids_N.device.type == "cpu":
            return self
        origin: TrainingBatch | None = self.__dict__.get("_origin")
        return self._map_tensors(Tensor.cpu, self.seqlens) if origin is None else origin

    @cached_property
    def trained_M(self) -> Tensor:
        """int64; the places of the trained targets, `[M]`."""
        return self.on_cpu.mask_N.nonzero()[:, 0].to(self.ids_N.device)

    def select(self, rows: Sequence[int]) -> TrainingBatch:
        """The part made of the given rows, by their index in this batch, in the given order."""
        starts = [0, *accumulate(self.seqlens)]
        place_N = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows] or [torch.arange(0)])
        place_N = place_N.to(self.ids_N.device)
        return self._map_tensors(lambda tensor: tensor[place_N], [self.seqlens[row] for row in rows])

    def one_target(self) -> TrainingBatch:
        """The first trained target alone, as a row of one entry: the smallest part that any computation accepts."""
        place = int(self.mask_N.int().argmax())
        return self._map_tensors(lambda tensor: tensor[place : place + 1], [1], {"position_N": self.position_N[:1] * 0})

    def _map_tensors(
        self, change: Callable[[Tensor], Tensor], seqlens: Sequence[int], further: Mapping[str, Tensor] | None = None
    ) -> TrainingBatch:
        """The batch of changed tensors, and `further` ones as they are."""
        tensors = {name: change(tensor) for name, tensor in self._tensors().items()} | dict(further or {})
        further_tensors = {"experts_NRK": self.experts_NRK, "reference_logp_N": self.reference_logp_N}
        tensors |= {name: change(tensor) for name, tensor in further_tensors.items() if tensor is not None}
        divides = self.divides_trajectories
        return TrainingBatch(**tensors, seqlens=tuple(seqlens), totals=self.totals, divides_trajectories=divides)

    def minibatches(self, number: int) -> list[TrainingBatch]:
        """Splits the batch into parts of about equally many trajectories, in order, one per optimizer step.

        No part is empty.

        Weights are multiplied by the number of parts, so that a part's loss is as large as the whole's.
        """
        trajectory_B = self.trajectory_N[self.cu_seqlens[:-1].long()].tolist() if self.seqlens else []
        numbers = {trajectory: index for index, trajectory in enumerate(dict.fromkeys(trajectory_B))}
        number = max(1, min(number, len(numbers)))
        if number == 1:
            return [self]
        parts: list[list[int]] = [[] for _ in range(number)]
        for row, trajectory in enumerate(trajectory_B):
            parts[numbers[trajectory] * number // len(numbers)].append(row)
        chosen = [self.select(rows) for rows in parts]
        return [replace(part, weight_N=part.weight_N * number) for part in chosen]

    def portions(self, max_tokens: int) -> list[list[int]]:
        """The rows of each micro-batch, by their index in this batch; see `split`."""
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; a micro-batch holds at least one token")
        parts: list[list[int]] = []
        room, shared_B = 0, self.shared_B
        for rows in self.units:
            whole = sum(self.seqlens[row] for row in rows) - sum(shared_B[row] for row in rows[1:])
            cost = whole - shared_B[rows[0]]
            if cost > room or not parts:
                parts.append([])
                room, cost = max_tokens, whole
            parts[-1] += rows
            room -= cost
        return parts

    def num_computed(self, max_tokens: int) -> int:
        """The number of entries that micro-batches of `max_tokens` compute: a shared prefix once in each of them."""
        firsts = [part[0] for part in self.portions(max_tokens)]
        shared_B = self.shared_B
        return sum(self.seqlens) - sum(shared_B) + sum(shared_B[row] for row in firsts)

    @property
    def shared_B(self) -> list[int]:
        """The number of entries of each row that the row before it begins with too; 0 for fewer than `MIN_SHARED`."""
        rows = [ids_N.numpy() for ids_N in self.on_cpu.ids_N.split(self.seqlens)] if self.seqlens else []
        lengths = [0, *(shared_length(before, ids) for before, ids in pairwise(rows))]
        return [length if length >= MIN_SHARED else 0 for length in lengths[: len(rows)]]

    @property
    def units(self) -> list[list[int]]:
        """The rows that stay in one micro-batch: each alone, or those of a trajectory that is not divided."""
        if self.divides_trajectories:
            return [[row] for row in range(self.num_rows)]
        first_B = [0, *accumulate(self.seqlens)][: self.num_rows]
        trajectory_B = self.on_cpu.trajectory_N[first_B].tolist()
        return [list(rows) for _, rows in groupby(range(self.num_rows), trajectory_B.__getitem__)]

    def split(self, max_tokens: int) -> list[TrainingBatch]:
        """Micro-batches of at most `max_tokens` entries each; a row is never cut, and a longer row is its own part.

        Rows stay in order, so that a group's rows are together. A prefix that a row shares with the one before it
        (`MIN_SHARED` entries or more) counts once, since it is computed once. An empty batch has no parts. Raises
        ConfigError when `max_tokens` is below 1.
        """
        return [self.select(part) for part in self.portions(max_tokens)]


def build_batch(
    groups: Sequence[Group],
    advantages: Sequence[GroupCredit],
    *,
    aggregation: str,
    norm_tokens: int | None = None,
    drop_zero: bool = False,
    totals: StepTotals | None = None,
) -> TrainingBatch:
    """The batch of one optimizer step: every row with a trained token, of every trained trajectory, in order.

    `advantages` holds one entry per group; `norm_tokens` is the constant of an aggregation that has one. `drop_zero`
    leaves out the rows of trajectories whose advantages are all 0: they have no gradient if the loss declares so (see
    `losses.traits`) and has no KL or entropy term. The denominators stay those of all trained tokens, or `totals` when
    the groups are one rank's share of a step. To keep dead groups out of the denominators too, leave them out of
    `groups`. If no row is left, the batch is empty (`num_rows == 0`).

    Raises InvalidTrajectory when groups and advantages do not line up or a failed trajectory is marked as trained,
    UnknownName for an unknown aggregation.
    """
    rows = _trained_rows(groups, advantages)
    return batch_of_rows(rows, aggregation=aggregation, norm_tokens=norm_tokens, drop_zero=drop_zero, totals=totals)


def batch_of_rows(
    rows: Sequence[TrainedRow],
    *,
    aggregation: str,
    norm_tokens: int | None = None,
    drop_zero: bool = False,
    totals: StepTotals | None = None,
) -> TrainingBatch:
    """The batch of rows, of which those of a trajectory are together; settings as in `build_batch`."""
    counts = RowCounts(
        tuple(trained.trajectory_index for trained in rows), tuple(trained.turn_tokens for trained in rows)
    )
    weights_B = turn_weights(aggregation, counts, totals, norm_tokens=norm_tokens)
    loud = {trained.trajectory_index for trained in rows if trained.advantages.any()}
    pairs = [pair for pair in zip(rows, weights_B, strict=True) if pair[0].trajectory_index in loud or not drop_zero]
    columns = [trained.columns(weights) for trained, weights in pairs]
    tensors: dict[str, Any] = {
        name: torch.cat([torch.zeros(0, dtype=dtype), *(column[name].to(dtype) for column in columns)])
        for name, dtype in DTYPES.items()
    }
    return TrainingBatch(
        **tensors,
        seqlens=tuple(len(trained.row) - 1 for trained, _ in pairs),
        totals=counts.totals if totals is None else totals,
        experts_NRK=_experts_of_rows([trained.row for trained, _ in pairs]),
    )


def _experts_of_rows(rows: Sequence[Row]) -> Tensor | None:
    """The experts of the input tokens of rows; None if none is recorded."""
    recorded = [row.experts_TRK for row in rows if row.experts_TRK is not None]
    if not recorded:
        return None
    free = np.full((1, *recorded[0].shape[1:]), -1, np.int16)
    parts = [row.experts_TRK if row.experts_TRK is not None else free.repeat(len(row), 0) for row in rows]
    return torch.from_numpy(np.concatenate([part[:-1] for part in parts]))


def plain_batch(trajectories: Sequence[Trajectory]) -> TrainingBatch:
    """The batch of all trained tokens of the trajectories, in order, whatever their rewards: every advantage is 1."""
    groups = [Group(trajectory.group, trajectory.task, (trajectory,)) for trajectory in trajectories]
    return build_batch(groups, [flat_credit(group, [1.0]) for group in groups], aggregation="token-mean")


def _trained_rows(groups: Sequence[Group], advantages: Sequence[GroupCredit]) -> list[TrainedRow]:
    if len(groups) != len(advantages):
        raise InvalidTrajectory(f"{len(groups)} groups need as many advantages, got {len(advantages)}")
    trained: list[TrainedRow] = []
    row_index = trajectory_index = 0
    for group, credit in zip(groups, advantages, strict=True):
        for place, (trajectory, member) in enumerate(zip(group.trajectories, _members(group, credit), strict=True)):
            for number, row in enumerate(trajectory.rows):
                if member is not None and row.num_trained_tokens:
                    further = (credit.returns, credit.values)
                    returns, values = (_numbers(numbers, place, number, member) for numbers in further)
                    trained.append(TrainedRow(row, row_index, trajectory_index, member[number], returns, values))
                row_index += 1
            trajectory_index += 1
    return trained


def _numbers(
    further: tuple[Advantages | None, ...] | None, place: int, row: int, like: Advantages
) -> NDArray[np.float32]:
    """The further numbers (returns or values) at the ids of a row; zeros where there are none."""
    member = None if further is None else further[place]
    return np.zeros_like(like[row]) if member is None else member[row]


def _members(group: Group, credit: GroupCredit) -> tuple[Advantages | None, ...]:
    """The advantages of each member, None for one that is not trained."""
    if len(credit.members) != len(group.trajectories):
        raise InvalidTrajectory(
            f"group {group.id!r} has {len(group.trajectories)} members but {len(credit.members)} advantages"
        )
    for trajectory, member in zip(group.trajectories, credit.members, strict=True):
        if member is not None:
            _check_trainable(trajectory, member)
    return credit.members


def _check_trainable(trajectory: Trajectory, member: Advantages) -> None:
    if not trajectory.status.trainable:
        raise InvalidTrajectory(
            f"member {trajectory.member} of group {trajectory.group!r} ended as {trajectory.status} and has no reward, "
            "but it has advantages; compute them with credit_groups"
        )
    sampled, num_advantages = [int(row.sampled_mask.sum()) for row in trajectory.rows], [len(row) for row in member]
    if sampled != num_advantages:
        raise InvalidTrajectory(
            f"member {trajectory.member} of group {trajectory.group!r} sampled {sampled} ids in its rows, and has "
            f"{num_advantages} advantages"
        )
