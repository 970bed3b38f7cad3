"""Selects the groups that a step learns from: those without a signal are replaced by further ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym.trajectory import Group, Status

__all__ = ["StepGroups", "fill_step", "is_live", "success_rate"]

Filter = Literal["off", "reward", "success"]


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The groups that were played for a step.

    Example: two groups are wanted, "3/0" has equal rewards, "3/1" and "3/2" have unequal ones. Then `groups` has all
    three and `kept` the last two. One group of four episodes was played beyond the two, so `refill_episodes` is 4.
    """

    groups: tuple[Group, ...]
    """All groups, in the order of their tasks (in the order of completion, if groups are played ahead)."""
    kept: tuple[Group, ...]
    """The groups that the step learns from, in the same order."""
    num_wanted: int
    filter: Filter = "off"

    @property
    def refill_episodes(self) -> int:
        """The number of episodes of the groups that replaced others."""
        return sum(len(group.trajectories) for group in self.groups[self.num_wanted :])

    @property
    def num_filtered(self) -> int:
        """The number of groups left out for lack of a signal; failed groups do not count."""
        live_ids = {group.id for group in self.kept}
        return sum(group.id not in live_ids and _num_trainable(group) > 1 for group in self.groups)

    def metrics(self) -> Mapping[str, float]:
        """Returns `filtered_groups` and `refill_episodes`; empty if the filter is off."""
        if self.filter == "off":
            return {}
        return {"filtered_groups": self.num_filtered, "refill_episodes": self.refill_episodes}


async def fill_step(
    play: Callable[[int, Sequence[Group]], Awaitable[list[Group]]],
    num_wanted: int,
    mode: Filter,
    max_refills: int,
    truncated_episodes: Literal["learn", "leave_out"] = "learn",
) -> StepGroups:
    """Plays `num_wanted` groups, and further ones for those without a signal, in up to `max_refills` rounds.

    `play(n, before)` plays the `n` groups whose tasks come after those of the groups `before`. Each round plays exactly
    as many groups as are missing, so every live group is used, and the tasks' order determines which those are.

    Dynamic sampling: Yu et al. (2025), DAPO, arXiv:2503.14476, equation 11 and algorithm 1. Difference: if the
    rounds do not suffice, the step learns from the groups that there are.
    """
    groups = await play(num_wanted, ())
    if mode == "off":
        return StepGroups(groups=tuple(groups), kept=tuple(groups), num_wanted=num_wanted)
    for _ in range(max_refills):
        num_lacking = num_wanted - sum(is_live(group, mode, truncated_episodes) for group in groups)
        if not num_lacking:
            break
        groups = [*groups, *await play(num_lacking, groups)]
    live = tuple(group for group in groups if is_live(group, mode, truncated_episodes))
    return StepGroups(groups=tuple(groups), kept=live, num_wanted=num_wanted, filter=mode)


def is_live(group: Group, mode: Filter, truncated_episodes: Literal["learn", "leave_out"] = "learn") -> bool:
    """Returns True if the episodes of a group that a step learns from differ in their rewards or their success.

    A group of fewer than two such episodes is not live.
    """
    episodes = [
        trajectory
        for trajectory in group.trajectories
        if trajectory.status.trainable and (truncated_episodes == "learn" or trajectory.status is not Status.TRUNCATED)
    ]
    return len({trajectory.reward if mode == "reward" else trajectory.success for trajectory in episodes}) > 1


def success_rate(group: Group) -> float | None:
    """Returns the share of a group's episodes with a reward that succeeded; None if no episode has a reward."""
    successes = [bool(trajectory.success) for trajectory in group.trajectories if trajectory.status.trainable]
    return sum(successes) / len(successes) if successes else None


def _num_trainable(group: Group) -> int:
    return sum(trajectory.status.trainable for trajectory in group.trajectories)
