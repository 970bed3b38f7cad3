"""The credit of each sampled token of a step: groups as tensors for an estimator, and its result back at the tokens.

Shapes: `B` trained episode, `T` its sampled tokens, padded to the longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.rewards.reward import components_of
from agentgym.trainers.algorithms.estimators import check_settings, estimate, needs_groups, needs_input
from agentgym.trajectory import Group, Row, Trajectory

__all__ = [
    "Advantages",
    "CreditInputs",
    "GroupCredit",
    "credit_groups",
    "credit_of_all",
    "flat_credit",
    "trained_episodes",
]

Advantages = tuple[NDArray[np.float32], ...]
"""One array per row, with a number for each sampled id of the row; 0 where the loss does not count the id."""


@dataclass(frozen=True, eq=False)
class GroupCredit:
    """The advantages of one group.

    Example: two episodes of one row, which sampled 3 and 2 ids, with rewards 1 and 0 under `dr_grpo` have `members`
    `(([.5, .5, .5],), ([-.5, -.5],))`.
    """

    members: tuple[Advantages | None, ...]
    """The advantages of each member; None for one that is not trained."""
    returns: tuple[Advantages | None, ...] | None = None
    """The targets of the critic's value before each id, by member; None where no critic learns."""
    values: tuple[Advantages | None, ...] | None = None
    """The critic's value before each id, by member; None where no critic learns."""

    @property
    def means(self) -> tuple[float | None, ...]:
        """The mean advantage of each member's sampled ids; None for a member that is not trained."""
        return tuple(
            None if member is None else float(np.concatenate(member).mean()) if any(map(len, member)) else 0.0
            for member in self.members
        )

    @property
    def dead(self) -> bool:
        """True if no token of the group has an advantage other than 0, so that it carries no signal."""
        return not any(row.any() for member in self.members if member is not None for row in member)


@dataclass(frozen=True, eq=False)
class CreditInputs:
    """The inputs of estimators beyond the episodes themselves, by trained episode, in the order of `trained_episodes`.

    An array has one number for each id that the episode sampled.
    """

    penalties: Sequence[NDArray[np.float64]] | None = None
    """The penalties that are subtracted from the rewards at the ids themselves, in units of reward."""
    values: Sequence[NDArray[np.float64]] | None = None
    """The critic's value before each id."""
    bootstrap: Sequence[float] | None = None
    """The critic's value after the last id of a truncated episode; 0 where the environment terminated."""
    proxy: Sequence[NDArray[np.float64]] | None = None
    """`1 - 2 p + sum p^2`, the squared norm of the gradient by the logits."""
    greedy: Mapping[str, float] = field(default_factory=dict)
    """The reward of a greedy episode of each task, by the group's id."""


def trained_episodes(groups: Sequence[Group], name: str, greedy: Mapping[str, float] | None = None) -> list[Trajectory]:
    """The episodes that the estimator `name` credits: those with a reward.

    If it compares them with a greedy episode of their task and that one failed, all episodes of the task are left out,
    since they would have no baseline.
    """
    left_out = needs_input(name, "greedy_B")
    compared = [group for group in groups if not left_out or group.id in (greedy or {})]
    return [episode for group in compared for episode in _trained_members(group)]


def credit_groups(
    groups: Sequence[Group],
    name: str,
    settings: Mapping[str, object] | None = None,
    *,
    allow_single: bool = False,
    inputs: CreditInputs | None = None,
) -> list[GroupCredit]:
    """The advantages of a step's groups under the estimator `name` of `ADVANTAGES`, which sees all of them at once.

    A turn's reward is placed at the last id of its reply. An episode without a reward is not trained and is in no
    statistics. A turn's state, for estimators that compare equal ones, is the text that the environment showed before
    it. Components of rewards are the metrics `reward/NAME` of an episode. Raises ConfigError for a group of one unless
    `allow_single` and where `inputs` lack an input of the estimator, and what `check_settings` and `estimate` raise.
    """
    options, inputs = dict(settings or {}), inputs or CreditInputs()
    check_settings(name, options)
    for group in groups:
        if len(group.trajectories) == 1 and not allow_single and needs_groups(name):
            raise ConfigError(
                f"group {group.id!r} is a group of one, which has no baseline, so its advantage is always 0 and "
                "nothing is learned: set the group size to 2 or more, or allow_single where that is meant"
            )
    trained = trained_episodes(groups, name, inputs.greedy)
    if not trained:
        return [GroupCredit((None,) * len(group.trajectories)) for group in groups]
    numbers = {id(episode): number for number, group in enumerate(groups) for episode in group.trajectories}
    episodes = [_Episode.of(episode, numbers[id(episode)]) for episode in trained]
    tensors = _tensors(episodes, inputs, name)
    credit = estimate(name, options, tensors)
    advantages = dict(zip(map(id, trained), _cut(credit.advantages_BT, episodes), strict=True))
    members = [tuple(advantages.get(id(episode)) for episode in group.trajectories) for group in groups]
    if inputs.values is None:
        return [GroupCredit(credited) for credited in members]
    returns = dict(zip(map(id, trained), _cut(credit.returns_BT, episodes), strict=True))
    values = dict(zip(map(id, trained), _cut(tensors["values_BT"], episodes), strict=True))
    return [
        GroupCredit(
            credited,
            returns=tuple(returns.get(id(member)) for member in group.trajectories),
            values=tuple(values.get(id(member)) for member in group.trajectories),
        )
        for credited, group in zip(members, groups, strict=True)
    ]


def credit_of_all(
    played: Sequence[Group], learned_from: Sequence[Group], credits: Sequence[GroupCredit]
) -> list[GroupCredit]:
    """The credit of each played group; in those that were not learned from, no member is trained."""
    credit_by_id = {group.id: credit for group, credit in zip(learned_from, credits, strict=True)}
    return [credit_by_id.get(group.id, GroupCredit((None,) * len(group.trajectories))) for group in played]


def flat_credit(group: Group, advantages: Sequence[float | None]) -> GroupCredit:
    """The credit with one number for all tokens of a member, and None for a member that is not trained."""
    pairs = zip(group.trajectories, advantages, strict=True)
    return GroupCredit(
        tuple(
            None
            if advantage is None
            else tuple(np.where(row.mask[row.sampled_mask], advantage, 0.0).astype(np.float32) for row in member.rows)
            for member, advantage in pairs
        )
    )


@dataclass(frozen=True, eq=False)
class _Episode:
    """The sampled tokens of one episode in the order of time, all rows in one: one number each.

    So what a branch did is credited with what came after it in any other.
    """

    rows: tuple[Row, ...]
    by_time: NDArray[np.int64]
    """The position of each token among those of the rows end to end."""
    group: int
    rewards: NDArray[np.float64]
    mask: NDArray[np.bool_]
    turns: NDArray[np.int64]
    states: tuple[str, ...]
    """The state of each turn."""
    group_id: str
    components: Mapping[str, float]
    """The components of the reward by name; NaN for one that is known not to apply."""

    @classmethod
    def of(cls, trajectory: Trajectory, group: int) -> _Episode:
        lengths = [len(span.ids) for row in trajectory.rows for span in row.spans if span.source == "policy"]
        order = trajectory.by_time
        ends = [0, *accumulate(lengths)]
        by_time = np.concatenate([np.arange(ends[turn], ends[turn + 1]) for turn in order] or [np.zeros(0, np.int64)])
        turns = np.repeat(np.arange(len(lengths)), [lengths[turn] for turn in order])
        rewards = np.zeros(sum(lengths))
        for end, turn in zip(accumulate(lengths), trajectory.turns, strict=True):
            rewards[max(end, 1) - 1] += turn.reward or 0.0
        mask = np.concatenate([row.mask[row.sampled_mask] for row in trajectory.rows])
        observations = ("", *(trajectory.turns[turn].observation for turn in order))
        states = observations[: len(lengths)]
        components = components_of(trajectory)
        sampled = rewards[by_time], mask[by_time], turns, states
        return cls(trajectory.rows, by_time, group, *sampled, trajectory.group, components)

    def cut(self, numbers_T: NDArray[np.float32]) -> Advantages:
        """The numbers of the episode's tokens, by row."""
        ends = [0, *accumulate(int(row.sampled_mask.sum()) for row in self.rows)]
        by_row_T = np.empty_like(numbers_T)
        by_row_T[self.by_time] = numbers_T
        return tuple(by_row_T[start:end] for start, end in pairwise(ends))


def _cut(numbers_BT: Tensor, episodes: Sequence[_Episode]) -> list[Advantages]:
    """The numbers of each episode, 0 wherever the loss does not count the id."""
    rows = numbers_BT.detach().to(torch.float32).numpy()
    parts = []
    for episode, row_T in zip(episodes, rows, strict=True):
        counted_T = np.where(episode.mask, row_T[: len(episode.mask)], np.float32(0))
        parts.append(episode.cut(counted_T))
    return parts


def _trained_members(group: Group) -> Iterator[Trajectory]:
    for trajectory in group.trajectories:
        if trajectory.reward is None or "ids_left_out" in trajectory.info:  # an agent over MCP, which sampled nothing
            continue
        if not trajectory.has_ids:
            raise InvalidTrajectory(
                f"member {trajectory.member} of group {trajectory.group!r} was played through a chat endpoint that "
                "returns no token ids: it holds no exact ids and cannot be trained on"
            )
        yield trajectory


def _tensors(episodes: Sequence[_Episode], inputs: CreditInputs, name: str) -> dict[str, Tensor]:
    """The tensors that the estimator `name` may take, as far as they are given."""

    def sort_by_time(numbers: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        return [values[episode.by_time] for values, episode in zip(numbers, episodes, strict=True)]

    rewards = [episode.rewards for episode in episodes]
    if inputs.penalties is not None:
        rewards = [earned - penalty for earned, penalty in zip(rewards, sort_by_time(inputs.penalties), strict=True)]
    names: dict[str, int] = {}
    states = [
        np.array([names.setdefault(state, len(names)) for state in episode.states])[episode.turns]
        for episode in episodes
    ]
    tensors = {
        "rewards_BT": _pad_arrays(rewards, 0.0),
        "mask_BT": _pad_arrays([episode.mask for episode in episodes], False),
        "groups_B": torch.tensor([episode.group for episode in episodes]),
        "turns_BT": _pad_arrays([episode.turns for episode in episodes], -1),
        "states_BT": _pad_arrays(states, -1),
    }
    for key, numbers in (("values_BT", inputs.values), ("proxy_BT", inputs.proxy)):
        if numbers is not None:
            tensors[key] = _pad_arrays(sort_by_time(numbers), 0.0)
    if inputs.bootstrap is not None:
        tensors["bootstrap_B"] = torch.tensor(inputs.bootstrap, dtype=torch.float64)
    if inputs.greedy:
        greedy = [inputs.greedy[episode.group_id] for episode in episodes]
        tensors["greedy_B"] = torch.tensor(greedy, dtype=torch.float64)
    if needs_input(name, "components_BTK"):
        tensors["components_BTK"] = _components(episodes)
    return tensors


def _components(episodes: Sequence[_Episode]) -> Tensor:
    """Each component of the reward at the last token of its episode, `[B, T, K]`; NaN for one that it lacks."""
    names = sorted({name for episode in episodes for name in episode.components})
    if not names:
        raise ConfigError(
            "the estimator weighs the components of a reward, and no episode has any: return "
            'Reward(value, components={"name": number}) from the reward function, or another advantage'
        )
    placed = []
    for name in names:
        columns = [np.zeros(len(episode.mask)) for episode in episodes]
        for column, episode in zip(columns, episodes, strict=True):
            column[-1] = episode.components.get(name, math.nan)
        placed.append(_pad_arrays(columns, 0.0))
    return torch.stack(placed, dim=-1)


def _pad_arrays(arrays: Sequence[NDArray[np.generic]], filler: float) -> Tensor:
    """Arrays of different lengths as one tensor, `[B, T]`."""
    width = max(len(array) for array in arrays)
    padded = np.full((len(arrays), width), filler, dtype=arrays[0].dtype)
    for line, array in zip(padded, arrays, strict=True):
        line[: len(array)] = array
    return torch.from_numpy(padded)
