"""Tasks that are given, such as those of a file, in epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import cast

from agentgym.data.loader import TaskLoader
from agentgym.errors import ConfigError
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["FixedTasks", "by_level"]


class FixedTasks:
    """A `TaskSource` of tasks that are given: those of a loader's stream, in which each is once an epoch.

    Places take the tasks of the stream in the order in which they are asked for; a step that an epoch ends in goes on
    with the next one. `eval_tasks` gives fewer tasks where there are fewer.
    """

    def __init__(self, loader: TaskLoader, held_out: Sequence[Task]) -> None:
        self.loader, self._held_out = loader, tuple(held_out)
        self._handed: dict[tuple[int, int], int] = {}
        """By step and place, the position in the stream of what was given there."""

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """The next tasks of the stream for places that were not asked for yet."""
        positions = [self._position(step, place) for place in places]
        return [self.loader.at(range(position, position + 1))[0] for position in positions]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """The first held-out tasks, in the order in which they were given."""
        return list(self._held_out[:num_tasks])

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Forgets the places of finished steps."""
        self._handed = {key: position for key, position in self._handed.items() if key[0] > step}

    def holds(self, task: Task) -> bool:
        """By the tasks' keys."""
        return task.key in self._keys

    def label(self, task: Task) -> str:
        """It has one part."""
        return ""

    def metrics(self) -> Mapping[str, float]:
        """`epochs`: how often each task was given, on average."""
        return {"epochs": round(self.loader.position / len(self.loader), 4)}

    def state(self) -> Mapping[str, JSON]:
        """That of the loader, and which of its tasks are at places of steps to come."""
        handed = [[step, place, position] for (step, place), position in self._handed.items()]
        return {"loader": self.loader.state(), "handed": handed}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Goes on from a `state`; raises ConfigError for one of other tasks."""
        self.loader.load(cast(Mapping[str, JSON], state["loader"]))
        handed = cast(Sequence[Sequence[int]], state["handed"])
        self._handed = {(step, place): position for step, place, position in handed}

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(task.key for task in (*self.loader.tasks, *self._held_out))

    def _position(self, step: int, place: int) -> int:
        """The position of a place's task; the next one where it has none."""
        if (step, place) not in self._handed:
            self._handed[step, place] = self.loader.position
            self.loader.position += 1
        return self._handed[step, place]


def by_level(tasks: Sequence[Task], path: str, values: Sequence[int | float | str]) -> dict[str, list[Task]]:
    """The tasks whose option at `path` (such as `extra_info.difficulty`) has one of the values, by the value's text.

    Raises ConfigError for a value that no task has.
    """
    found: dict[str, list[Task]] = {str(value): [] for value in values}
    for task in tasks:
        option: JSON = task.options
        for name in path.split("."):
            option = option.get(name) if isinstance(option, Mapping) else None
        if str(option) in found:
            found[str(option)].append(task)
    if empty := [value for value, own in found.items() if not own]:
        raise ConfigError(f"no training task has {path}={empty[0]}: curriculum.values are those of the tasks' options")
    return found
