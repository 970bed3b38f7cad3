"""Compares the episodes that asynchronous steps learn from with those that were ordered for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentgym.trajectory import Group

__all__ = ["StepLengths"]


class StepLengths:
    """Compares the length of what each step learned from with the length of what was ordered for it.

    A step takes the groups that are finished first, and short ones are finished first. A group's id names the step that
    it was ordered for (`3/0`), so the comparison for a step is complete when the last group that was ordered for it has
    been learned from, up to `max_staleness` steps later.

    Example: of 2 groups a step, step 1 learns from `1/1` (10 tokens an episode) and `2/0` (20), step 2 from `1/0` (60)
    and `2/1` (30). With step 2 the comparison for step 1 is complete: 15 tokens learned, 35 ordered.
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_wait = max_staleness + 1
        self._learned: dict[int, list[int]] = {}
        self._ordered: dict[int, list[list[int]]] = {}
        self._due: int | None = None
        """The first step whose comparison was not reported."""

    def add(self, step: int, groups: Sequence[Group]) -> Mapping[str, float]:
        """Adds the groups of a step, and returns the oldest comparison that is complete; empty if none is.

        `length_step` names its step, `length_learned` and `length_ordered` are sampled tokens an episode.
        """
        self._due = step if self._due is None else self._due
        self._learned[step] = []
        for group in groups:
            lengths = [sum(trajectory.reply_tokens) for trajectory in group.trajectories]
            self._learned[step] += lengths
            self._ordered.setdefault(int(group.id.partition("/")[0]), []).append(lengths)
        while self._due <= step:
            due, learned, ordered = self._due, self._learned.get(self._due, []), self._ordered.get(self._due, [])
            if len(ordered) < self._groups_per_step and step - due <= self._max_wait:
                return {}
            self._due += 1
            self._learned.pop(due, None)
            self._ordered.pop(due, None)
            of_order = [length for lengths in ordered for length in lengths]
            if len(ordered) >= self._groups_per_step and learned and of_order:
                return {
                    "length_step": due,
                    "length_learned": round(sum(learned) / len(learned), 2),
                    "length_ordered": round(sum(of_order) / len(of_order), 2),
                }
        return {}
