"""Tasks that are given out before the steps that learn from them, none of them lost when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from agentgym.rollout.sampling.group_stream import Order
from agentgym.trainers.tasks.source import TaskSource
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["AheadTasks"]


class AheadTasks:
    """A `TaskSource` whose tasks are ordered one by one, in the order of their steps and places.

    Its state names the orders that no step has learned from. A run that is resumed begins with them: the same tasks
    under the same names, so that their episodes have the same seeds.
    """

    def __init__(self, source: TaskSource, tasks_per_step: int) -> None:
        self.source = source
        self._tasks_per_step = tasks_per_step
        self._next = (1, 0)
        """The step and place whose task was not ordered yet."""
        self._ahead: dict[str, Order] = {}
        """By the name of the group: what was ordered and is not finished."""
        self._again: dict[str, Order] = {}
        """What of it was ordered before the run was resumed, and not again yet."""
        self._resumed: set[str] = set()
        self._num_resumed = 0

    def orders(self) -> Iterator[Order]:
        """One task after the other, without end; each is asked of the source when it is ordered."""
        while True:
            if self._again:
                yield self._again.pop(next(iter(self._again)))
                continue
            step, place = self._next
            self._next = (step, place + 1) if place + 1 < self._tasks_per_step else (step + 1, 0)
            (task,) = self.source.train_tasks(step, range(place, place + 1))
            order = self._ahead[f"{step}/{place}"] = Order(task, f"{step}/{place}", step)
            yield order

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Those of the source; they count as ordered only where `orders` gives them."""
        return self.source.train_tasks(step, places)

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Those of the source."""
        return self.source.eval_tasks(num_tasks)

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """The orders of these groups are done."""
        for group in groups:
            self._ahead.pop(group.id, None)
        names = {group.id for group in groups}
        self._num_resumed = len(names & self._resumed)
        self._resumed -= names
        self.source.finish(step, groups)

    def holds(self, task: Task) -> bool:
        """Whether the source does."""
        return self.source.holds(task)

    def label(self, task: Task) -> str:
        """That of the source."""
        return self.source.label(task)

    def metrics(self) -> Mapping[str, float]:
        """`resumed_groups`, those that were ordered before the run was resumed, and what the source says."""
        return {**self.source.metrics(), "resumed_groups": self._num_resumed}

    def state(self) -> Mapping[str, JSON]:
        """The orders that are not done, the place of the next one, and the state of the source."""
        ahead: list[JSON] = [[one.step, one.key, _to_json(one.task)] for one in self._ahead.values()]
        return {"ahead": ahead, "next": list(self._next), "source": self.source.state()}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Goes on from a `state`."""
        stored = cast(Sequence[tuple[int, str, Mapping[str, JSON]]], state["ahead"])
        self._ahead = {key: Order(Task(**task), key, step) for step, key, task in stored}  # type: ignore[arg-type]
        self._again = dict(self._ahead)
        self._resumed = set(self._ahead)
        step, place = cast(tuple[int, int], state["next"])
        self._next = (step, place)
        self.source.load(cast(Mapping[str, JSON], state["source"]))


def _to_json(task: Task) -> dict[str, JSON]:
    return {"env_id": task.env_id, "seed": task.seed, "options": task.options, "kwargs": task.kwargs}
