"""Earlier tasks again: those whose groups had little success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from agentgym.trainers.tasks.filtering import success_rate
from agentgym.trainers.tasks.practice import ReplayConfig
from agentgym.trainers.tasks.source import TaskSource
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["ReplayedTasks"]


@dataclass(frozen=True, slots=True)
class _Memory:
    """A task that went badly, and how often it was played again."""

    task: Task
    replays: int = 0

    def to_json(self) -> Mapping[str, JSON]:
        task = self.task
        told: Mapping[str, JSON] = {
            "env_id": task.env_id,
            "seed": task.seed,
            "options": task.options,
            "kwargs": task.kwargs,
        }
        return {"task": told, "replays": self.replays}

    @classmethod
    def of(cls, stored: Mapping[str, JSON]) -> _Memory:
        task = cast(Mapping[str, JSON], stored["task"])
        return cls(Task(**task), cast(int, stored["replays"]))  # type: ignore[arg-type]  # its own to_json wrote it


class ReplayedTasks:
    """A `TaskSource` that gives a share of the places to earlier tasks; the others are those of `source`.

    The task that has waited longest comes first. It is remembered again where it goes badly again. The source hears of
    new tasks alone: what is replayed was picked for its failures, and says little of how hard the source's tasks are.
    """

    def __init__(self, source: TaskSource, config: ReplayConfig) -> None:
        self.source, self.config = source, config
        self._memory: dict[str, _Memory] = {}
        """By the tasks' keys, the oldest first."""
        self._handed: dict[tuple[int, int], _Memory] = {}
        """By step and place, what is to be played again there."""
        self._metrics: dict[str, float] = {}

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Earlier tasks at every so many places, as long as there are some."""
        return [self._task(step, place) for place in places]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Those of the source."""
        return self.source.eval_tasks(num_tasks)

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Remembers the tasks whose groups went badly; a group that failed altogether says nothing of its task."""
        replayed = {one.task.key: one for one in self._handed.values()}
        own = {group.task.key for group in groups}
        self._handed = {key: one for key, one in self._handed.items() if one.task.key not in own}
        rates = []
        for group in groups:
            key, rate = group.task.key, success_rate(group)
            before = replayed.get(key)
            replays = 0 if before is None else before.replays + 1
            if rate is None:
                continue
            rates += [] if before is None else [rate]
            self._memory.pop(key, None)
            if self.config.min_success <= rate <= self.config.max_success and replays < self.config.max_replays:
                self._memory[key] = _Memory(group.task, replays)
        for key in list(self._memory)[: max(0, len(self._memory) - self.config.memory)]:
            del self._memory[key]
        new = [group for group in groups if group.task.key not in replayed]
        self.source.finish(step, new)
        self._metrics = {"replayed_groups": len(groups) - len(new), "replay_memory": len(self._memory)}
        if rates:
            self._metrics["replay_success"] = sum(rates) / len(rates)

    def holds(self, task: Task) -> bool:
        """Whether the source does."""
        return self.source.holds(task)

    def label(self, task: Task) -> str:
        """That of the source."""
        return self.source.label(task)

    def metrics(self) -> Mapping[str, float]:
        """`replayed_groups`, `replay_success`, `replay_memory` (tasks that wait), and what the source says."""
        return {**self.source.metrics(), **self._metrics}

    def state(self) -> Mapping[str, JSON]:
        """The tasks that are remembered, and that of the source."""
        return {
            "memory": [one.to_json() for one in self._memory.values()],
            "handed": [[step, place, one.to_json()] for (step, place), one in self._handed.items()],
            "source": self.source.state(),
        }

    def load(self, state: Mapping[str, JSON]) -> None:
        """Goes on from a `state`."""
        memory = [_Memory.of(one) for one in cast(Sequence[Mapping[str, JSON]], state["memory"])]
        self._memory = {one.task.key: one for one in memory}
        handed = cast(Sequence[tuple[int, int, Mapping[str, JSON]]], state["handed"])
        self._handed = {(step, place): _Memory.of(one) for step, place, one in handed}
        self.source.load(cast(Mapping[str, JSON], state["source"]))

    def _task(self, step: int, place: int) -> Task:
        share = self.config.share
        is_for_replay = int((place + 1) * share + 1e-9) > int(place * share + 1e-9)
        if is_for_replay and (step, place) not in self._handed and self._memory:
            self._handed[step, place] = self._memory.pop(next(iter(self._memory)))
        if (step, place) in self._handed:
            return self._handed[step, place].task
        return self.source.train_tasks(step, range(place, place + 1))[0]
