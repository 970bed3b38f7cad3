"""Decides which groups may begin and which a step has to take, so that nothing too old is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import ConfigError, TrainingHalted
from agentgym.trajectory import Group

__all__ = ["Choice", "StalenessPlan", "ages", "staleness"]


def ages(groups: Sequence[Group], version: int) -> NDArray[np.int64]:
    """Returns by how many updates each sampled token of the groups is older than policy `version`."""
    rows = [row for group in groups for trajectory in group.trajectories for row in trajectory.rows]
    return np.concatenate([version - row.policy_versions[row.sampled_mask] for row in rows] or [np.zeros(0, np.int64)])


def staleness(groups: Sequence[Group], version: int) -> Mapping[str, float]:
    """Returns `staleness_mean` and `staleness_max` of the sampled tokens, in updates; 0 without a token."""
    age_N = ages(groups, version)
    if not len(age_N):
        return {"staleness_mean": 0.0, "staleness_max": 0}
    return {"staleness_mean": round(float(age_N.mean()), 4), "staleness_max": int(age_N.max())}


class Choice:
    """The groups that one step may still take, in order of completion; made by `StalenessPlan.choose`."""

    def __init__(self, version: int, later: Sequence[int]) -> None:
        self._version = version
        self._later = list(later)
        """The number, at index i, of further groups of this step that may be due after `version + i`."""

    def takes(self, due: int) -> bool:
        """Returns whether the step takes a group due at this version; room is kept for each that cannot wait."""
        steps = range(min(due - self._version, len(self._later)))
        if not all(self._later[step] > 0 for step in steps):
            return False
        for step in steps:
            self._later[step] -= 1
        return True


class StalenessPlan:
    """Guarantees that no token is older than `max_staleness` updates when a step takes it, and throws nothing away.

    A step takes `groups_per_step` groups at a policy version and makes the next one. A group that begins at version b
    has tokens of version b or newer, so it is due at b + max_staleness: the last version at which a step may take it.
    It begins only if it fits into the steps up to then, after all that began before. A step takes any groups, except
    that those that are left must fit into the steps to come.

    Example: with 16 groups a step and max_staleness 1, 32 begin at version 0. The first step takes any 16; while it
    learns none begins, as the other 16 fill the step at version 1. With version 1 there is room for 16, due at 2.
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        if groups_per_step < 1 or max_staleness < 0:
            raise ConfigError(
                f"groups_per_step is at least 1 and max_staleness at least 0, got {groups_per_step} and {max_staleness}"
            )
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.version = 0
        """The version of the newest weights, under which a group begins."""
        self.num_ahead = 0
        """The number of groups that began and were not taken."""
        self._next = 0
        """The version at which the next step takes its groups; ahead of `version` while a step learns."""
        self._due: Counter[int] = Counter()

    @property
    def max_ahead(self) -> int:
        """The number of groups that can be ahead at once."""
        return self.groups_per_step * (self.max_staleness + 1)

    @property
    def has_room(self) -> bool:
        """True if a group may begin now."""
        return self.num_ahead < self.groups_per_step * (self.version + self.max_staleness - self._next + 1)

    def begin(self) -> int:
        """Counts a group that begins now; returns the version at which it is due."""
        due = self.version + self.max_staleness
        self._due[due] += 1
        self.num_ahead += 1
        return due

    def choose(self, num_groups: int) -> Choice:
        """Returns what a step may take now that wants so many groups; nothing is counted before `take`."""
        later, num_due = [], 0
        for step in range(self.max_staleness):
            num_due += self._due[self.version + step]
            must = num_due - self.groups_per_step * step  # those beyond the room in the steps until then
            later.append(num_groups - max(0, must))
        return Choice(self.version, later)

    def take(self, dues: Sequence[int]) -> None:
        """Counts that a step has taken groups which were due at these versions.

        The next groups are for the next step, or replace some of this one.
        """
        self._due.subtract(dues)
        self.num_ahead -= len(dues)
        self._next = self.version + 1

    def advance(self, version: int) -> None:
        """Counts an update of the weights; raises TrainingHalted if a group can no longer be taken in time."""
        if version < self.version:
            raise ConfigError(f"policy versions never fall: the plan is at {self.version}, got {version}")
        self.version = version
        self._next = max(self._next, version)
        self._due = Counter({due: number for due, number in self._due.items() if number})
        late = [due for due in self._due if due < version]
        if late:
            raise TrainingHalted(
                f"policy version {version} came before a step had taken {sum(self._due[due] for due in late)} groups"
                f" that may be {self.max_staleness} updates old at most: take {self.groups_per_step} groups before"
                " each update"
            )
