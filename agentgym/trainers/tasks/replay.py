"""Replays earlier tasks: those whose groups had little success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from agentgym.trainers.tasks.filtering import success_rate
from agentgym.trainers.tasks.practice import ReplayConfig
from agentgym.trainers.tasks.source import TaskSource, task_to_json
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["ReplayedTasks"]


@dataclass(frozen=True, slots=True)
class _Memory:
    """A task with little success, and how often it was played again."""

    task: Task
    replays: int = 0

    def to_json(self) -> Mapping[str, JSON]:
        return {"task": task_to_json(self.task), "replays": self.replays}

    @classmethod
    def of(cls, stored: Mapping[str, JSON]) -> _Memory:
        task = cast(Mapping[str, JSON], stored["task"])
        return cls(Task(**task), cast(int, stored["replays"]))  # type: ignore[arg-type]  # its own to_json wrote it


class ReplayedTasks:
    """A `TaskSource` that gives a share of the places to earlier tasks; the others are those of `source`.

    The task that has waited longest comes first. It is remembered again if it has little success again. The source gets
    the groups of new tasks only: replayed tasks were chosen for their failures, and do not show how hard its tasks are.
    """

    def __init__(self, source: TaskSource, config: ReplayConfig) -> None:
        self.source, self.config = source, config
        self._memory: dict[str, _Memory] = {}
        """The remembered tasks by their keys, the oldest first."""
        self._replays: dict[tuple[int, int], _Memory] = {}
        """The tasks to be played again, by step and place."""
        self._metrics: dict[str, float] = {}

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns the tasks of the places, with earlier ones at regular intervals as long as there are some."""
        return [self._task(step, place) for place in places]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns the held-out tasks of the source."""
        return self.source.eval_tasks(num_tasks)

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Remembers the tasks whose groups had little success; a group without any reward is ignored."""
        replayed = {memory.task.key: memory for memory in self._replays.values()}
        own = {group.task.key for group in groups}
        self._replays = {key: memory for key, memory in self._replays.items() if memory.task.key not in own}
        rates = []
        for group in groups:
            key, rate = group.task.key, success_rate(group)
            before = replayed.get(key)
            replays = 0 if before is None else before.replays + 1
            if rate is None:
                continue
            rates += [] if before is None else [rate]
            self._memory.pop(key, None)
            min_rate, max_rate = self.config.success
            if min_rate <= rate <= max_rate and replays < self.config.max_replays:
                self._memory[key] = _Memory(group.task, replays)
        for key in list(self._memory)[: max(0, len(self._memory) - self.config.memory)]:
            del self._memory[key]
        new = [group for group in groups if group.task.key not in replayed]
        self.source.finish(step, new)
        self._metrics = {"replayed_groups": len(groups) - len(new), "replay_memory": len(self._memory)}
        if rates:
            self._metrics["replay_success"] = sum(rates) / len(rates)

    def holds(self, task: Task) -> bool:
        """Returns True if the source holds the task."""
        return self.source.holds(task)

    def label(self, task: Task) -> str:
        """Returns the label of the source."""
        return self.source.label(task)

    def metrics(self) -> Mapping[str, float]:
        """Returns `replayed_groups`, `replay_success`, `replay_memory` (tasks that wait), and the source's metrics."""
        return {**self.source.metrics(), **self._metrics}

    def state(self) -> Mapping[str, JSON]:
        """Returns the remembered tasks, and the state of the source."""
        return {
            "memory": [memory.to_json() for memory in self._memory.values()],
            "handed": [[step, place, memory.to_json()] for (step, place), memory in self._replays.items()],
            "source": self.source.state(),
        }

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""
        memories = [_Memory.of(stored) for stored in cast(Sequence[Mapping[str, JSON]], state["memory"])]
        self._memory = {memory.task.key: memory for memory in memories}
        handed = cast(Sequence[tuple[int, int, Mapping[str, JSON]]], state["handed"])
        self._replays = {(step, place): _Memory.of(stored) for step, place, stored in handed}
        self.source.load(cast(Mapping[str, JSON], state["source"]))

    def _task(self, step: int, place: int) -> Task:
        share = self.config.share
        is_for_replay = int((place + 1) * share + 1e-9) > int(place * share + 1e-9)
        if is_for_replay and (step, place) not in self._replays and self._memory:
            self._replays[step, place] = self._memory.pop(next(iter(self._memory)))
        if (step, place) in self._replays:
            return self._replays[step, place].task
        return self.source.train_tasks(step, range(place, place + 1))[0]
