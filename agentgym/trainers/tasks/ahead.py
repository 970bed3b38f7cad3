"""Tasks that are requested before the steps that learn from them, of which none is lost when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from agentgym.rollout.sampling.group_stream import GroupRequest
from agentgym.trainers.tasks.source import TaskSource, task_to_json
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["AheadTasks"]


class AheadTasks:
    """A `TaskSource` whose tasks are requested one by one, in the order of their steps and places.

    Its state contains the requests that no step has learned from. A resumed run starts with them: the same tasks under
    the same names, so that their episodes have the same seeds.
    """

    def __init__(self, source: TaskSource, tasks_per_step: int) -> None:
        self.source = source
        self._tasks_per_step = tasks_per_step
        self._next = (1, 0)
        """The step and place of the next task to request."""
        self._ahead: dict[str, GroupRequest] = {}
        """The requests that are not finished, by the name of the group."""
        self._again: dict[str, GroupRequest] = {}
        """The requests from before the run was resumed that were not made again yet."""
        self._resumed: set[str] = set()
        self._num_resumed = 0

    def requests(self) -> Iterator[GroupRequest]:
        """Yields one request after the other, without end; each task is taken from the source when it is requested."""
        while True:
            if self._again:
                yield self._again.pop(next(iter(self._again)))
                continue
            step, place = self._next
            self._next = (step, place + 1) if place + 1 < self._tasks_per_step else (step + 1, 0)
            (task,) = self.source.train_tasks(step, range(place, place + 1))
            request = self._ahead[f"{step}/{place}"] = GroupRequest(task, f"{step}/{place}", step)
            yield request

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns the tasks of the source; they count as requested only if `requests` yields them."""
        return self.source.train_tasks(step, places)

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns the held-out tasks of the source."""
        return self.source.eval_tasks(num_tasks)

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Removes the requests of these groups."""
        for group in groups:
            self._ahead.pop(group.id, None)
        names = {group.id for group in groups}
        self._num_resumed = len(names & self._resumed)
        self._resumed -= names
        self.source.finish(step, groups)

    def holds(self, task: Task) -> bool:
        """Returns True if the source holds the task."""
        return self.source.holds(task)

    def label(self, task: Task) -> str:
        """Returns the label of the source."""
        return self.source.label(task)

    def metrics(self) -> Mapping[str, float]:
        """Returns `resumed_groups`, those requested before the run was resumed, and the metrics of the source."""
        return {**self.source.metrics(), "resumed_groups": self._num_resumed}

    def state(self) -> Mapping[str, JSON]:
        """Returns the requests that are not finished, the place of the next one, and the state of the source."""
        ahead: list[JSON] = [
            [request.step, request.key, task_to_json(request.task)] for request in self._ahead.values()
        ]
        return {"ahead": ahead, "next": list(self._next), "source": self.source.state()}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""
        stored = cast(Sequence[tuple[int, str, Mapping[str, JSON]]], state["ahead"])
        self._ahead = {key: GroupRequest(Task(**task), key, step) for step, key, task in stored}  # type: ignore[arg-type]
        self._again = dict(self._ahead)
        self._resumed = set(self._ahead)
        step, place = cast(tuple[int, int], state["next"])
        self._next = (step, place)
        self.source.load(cast(Mapping[str, JSON], state["source"]))
