"""What each sampled token of a step earned: the groups as tensors, and an estimator's result back at the tokens.

Shapes: `B` trained episode, `T` its sampled tokens, padded to the longest.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.settings import settings_of, with_settings
from agentgym.trainers.advantages.registry import ADVANTAGES
from agentgym.trajectory import Group, Row, Trajectory

__all__ = ["INPUTS", "Advantages", "GroupCredit", "check_estimator", "credit_groups", "flat_credit", "needs_groups"]

Advantages = tuple[NDArray[np.float32], ...]
"""One array a row, with one number for each id of it that was sampled; 0 where the loss does not count the id."""
INPUTS = ("rewards_BT", "mask_BT", "groups_B", "turns_BT", "states_BT")
"""The tensors of `AdvantageEstimator` that a step's episodes alone give."""


@dataclass(frozen=True, eq=False)
class GroupCredit:
    """The advantages of one group.

    Example: two episodes of one row, which sampled 3 and 2 ids, with rewards 1 and 0 under `dr_grpo` have `members`
    `(([.5, .5, .5],), ([-.5, -.5],))`.
    """

    members: tuple[Advantages | None, ...]
    """By member; None for one that is not trained."""

    @property
    def means(self) -> tuple[float | None, ...]:
        """By member, the mean advantage of the ids that were sampled; None for one that is not trained."""
        return tuple(
            None if member is None else float(np.concatenate(member).mean()) if any(map(len, member)) else 0.0
            for member in self.members
        )

    @property
    def dead(self) -> bool:
        """Whether no token of the group has an advantage other than 0, so that it carries no signal."""
        return not any(row.any() for member in self.members if member is not None for row in member)


def check_estimator(name: str, settings: Mapping[str, object]) -> None:
    """Raises UnknownName for an estimator that does not exist, ConfigError for one that needs more than the episodes
    of a step (a critic, greedy episodes) and for a setting that it does not have or of another type."""
    parameters = inspect.signature(ADVANTAGES[name]).parameters.values()
    needed = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY and one.default is one.empty]
    if lacking := [one for one in needed if one not in INPUTS]:
        raise ConfigError(f"{name} needs {', '.join(lacking)}, which a step's episodes do not give")
    with_settings(name, ADVANTAGES[name], settings)


def needs_groups(name: str) -> bool:
    """Whether an estimator holds episodes against others of their group, so that a group of one has no baseline."""
    return "allow_single" in settings_of(ADVANTAGES[name])


def credit_groups(
    groups: Sequence[Group], name: str, settings: Mapping[str, object] | None = None, *, allow_single: bool = False
) -> list[GroupCredit]:
    """The advantages of a step's groups under the estimator `name` of `ADVANTAGES`, which sees all of them at once.

    A turn's reward stands at the last id of its reply. An episode without a reward is not trained and is in no
    statistics. A turn's state, for estimators that compare equal ones, is the text that the environment showed before
    it. Raises ConfigError for a group of one unless `allow_single`, and what `check_estimator` raises.
    """
    given = dict(settings or {})
    check_estimator(name, given)
    for group in groups:
        if len(group.trajectories) == 1 and not allow_single and needs_groups(name):
            raise ConfigError(
                f"group {group.id!r} is a group of one, which has no baseline, so its advantage is always 0 and "
                "nothing is learned: set the group size to 2 or more, or allow_single where that is meant"
            )
    episodes = [_Episode.of(one, number) for number, group in enumerate(groups) for one in _trained(group)]
    parameters = inspect.signature(ADVANTAGES[name]).parameters
    if "allow_single" in parameters:  # what is left of a larger group may be one episode
        given["allow_single"] = True
    if not episodes:
        return [GroupCredit((None,) * len(group.trajectories)) for group in groups]
    tensors = {key: value for key, value in _tensors(episodes).items() if key in parameters}
    advantages_BT = ADVANTAGES[name](**tensors, **given).advantages_BT.to(torch.float32).numpy()
    cut = (episode.cut(row_T) for episode, row_T in zip(episodes, advantages_BT, strict=True))
    return [
        GroupCredit(tuple(next(cut) if one.reward is not None else None for one in group.trajectories))
        for group in groups
    ]


def flat_credit(group: Group, advantages: Sequence[float | None]) -> GroupCredit:
    """One number for all tokens of a member, None for a member that is not trained."""
    pairs = zip(group.trajectories, advantages, strict=True)
    return GroupCredit(
        tuple(
            None
            if advantage is None
            else tuple(np.where(row.mask[row.sampled], advantage, 0.0).astype(np.float32) for row in one.rows)
            for one, advantage in pairs
        )
    )


@dataclass(frozen=True, eq=False)
class _Episode:
    """The sampled tokens of one episode, all rows end to end: one number each."""

    rows: tuple[Row, ...]
    group: int
    rewards: NDArray[np.float64]
    mask: NDArray[np.bool_]
    turns: NDArray[np.int64]
    states: tuple[str, ...]
    """By turn."""

    @classmethod
    def of(cls, trajectory: Trajectory, group: int) -> _Episode:
        lengths = [len(span.ids) for row in trajectory.rows for span in row.spans if span.source == "policy"]
        turns = np.repeat(np.arange(len(lengths)), lengths)
        rewards = np.zeros(sum(lengths))
        for end, turn in zip(accumulate(lengths), trajectory.turns, strict=True):
            rewards[max(end, 1) - 1] += turn.reward or 0.0
        mask = np.concatenate([row.mask[row.sampled] for row in trajectory.rows])
        shown = ("", *(turn.observation for turn in trajectory.turns))
        return cls(trajectory.rows, group, rewards, mask, turns, shown[: len(lengths)])

    def cut(self, advantages_T: NDArray[np.float32]) -> Advantages:
        """The numbers of its tokens, by row."""
        ends = [0, *accumulate(int(row.sampled.sum()) for row in self.rows)]
        return tuple(advantages_T[start:end] for start, end in pairwise(ends))


def _trained(group: Group) -> Iterator[Trajectory]:
    for trajectory in group.trajectories:
        if trajectory.reward is None:
            continue
        if not trajectory.has_ids:
            raise InvalidTrajectory(
                f"member {trajectory.member} of group {trajectory.group!r} was played through a chat endpoint that "
                "returns no token ids: it holds no exact ids and cannot be trained on"
            )
        yield trajectory


def _tensors(episodes: Sequence[_Episode]) -> dict[str, Tensor]:
    names: dict[str, int] = {}
    states = [np.array([names.setdefault(one, len(names)) for one in each.states])[each.turns] for each in episodes]
    return {
        "rewards_BT": _padded([one.rewards for one in episodes], 0.0),
        "mask_BT": _padded([one.mask for one in episodes], False),
        "groups_B": torch.tensor([one.group for one in episodes]),
        "turns_BT": _padded([one.turns for one in episodes], -1),
        "states_BT": _padded(states, -1),
    }


def _padded(arrays: Sequence[NDArray[np.generic]], filler: float) -> Tensor:
    """Arrays of different lengths as one tensor, `[B, T]`."""
    width = max(len(array) for array in arrays)
    padded = np.full((len(arrays), width), filler, dtype=arrays[0].dtype)
    for line, array in zip(padded, arrays, strict=True):
        line[: len(array)] = array
    return torch.from_numpy(padded)
