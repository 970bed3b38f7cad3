"""Which groups a step learns from: those without a signal are left out, and further ones are played for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym.trajectory import Group, Status

__all__ = ["StepGroups", "fill_step", "is_live", "success_rate"]

Filter = Literal["off", "reward", "success"]


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """What was played for a step.

    Example: with two groups wanted, "3/0" of equal rewards and "3/1", "3/2" of unequal ones make `groups` of all three
    and `kept` of the last two; one group of four episodes was played beyond the two, so `refill_episodes` is 4.
    """

    groups: tuple[Group, ...]
    """All, in the order in which their tasks were given out (as they came, where groups are played ahead)."""
    kept: tuple[Group, ...]
    """Those that the step learns from, in the same order."""
    num_wanted: int
    filter: Filter = "off"

    @property
    def refill_episodes(self) -> int:
        """Episodes of the groups that were played in place of others."""
        return sum(len(group.trajectories) for group in self.groups[self.num_wanted :])

    @property
    def num_filtered(self) -> int:
        """Groups that were left out for want of a signal; those that failed are not among them."""
        kept = {group.id for group in self.kept}
        return sum(group.id not in kept and _num_trainable(group) > 1 for group in self.groups)

    def metrics(self) -> Mapping[str, float]:
        """`filtered_groups` and `refill_episodes`; nothing where nothing is filtered."""
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
    as many as lack, so every live group is used, and which those are follows from the tasks' order.

    Dynamic sampling: Yu et al. (2025), DAPO, arXiv:2503.14476, equation 11 and algorithm 1. Difference: where the
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
    kept = tuple(group for group in groups if is_live(group, mode, truncated_episodes))
    return StepGroups(groups=tuple(groups), kept=kept, num_wanted=num_wanted, filter=mode)


def is_live(group: Group, mode: Filter, truncated_episodes: Literal["learn", "leave_out"] = "learn") -> bool:
    """Whether the episodes of a group that a step learns from differ, in their rewards or in their success; a group of
    fewer than two does not."""
    kept = [
        one
        for one in group.trajectories
        if one.status.trainable and (truncated_episodes == "learn" or one.status is not Status.TRUNCATED)
    ]
    return len({one.reward if mode == "reward" else one.success for one in kept}) > 1


def success_rate(group: Group) -> float | None:
    """The share of a group's episodes that succeeded, of those that have a reward; None where none has one."""
    kept = [bool(one.success) for one in group.trajectories if one.status.trainable]
    return sum(kept) / len(kept) if kept else None


def _num_trainable(group: Group) -> int:
    return sum(one.status.trainable for one in group.trajectories)
