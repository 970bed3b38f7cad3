"""Given tasks, such as those of a file, in epochs."""

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
    """A `TaskSource` of given tasks: those of a loader's stream, which has each task once per epoch.

    Places take the tasks of the stream in the order in which they are requested; a step in which an epoch ends goes on
    with the next epoch. `eval_tasks` returns fewer tasks if there are fewer.
    """

    def __init__(self, loader: TaskLoader, held_out: Sequence[Task]) -> None:
        self.loader, self._held_out = loader, tuple(held_out)
        self._positions: dict[tuple[int, int], int] = {}
        """The position in the stream of the task of each step and place."""

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns the tasks of the places; a new place takes the next task of the stream."""
        positions = [self._position(step, place) for place in places]
        return [self.loader.at(range(position, position + 1))[0] for position in positions]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns the first held-out tasks, in the given order."""
        return list(self._held_out[:num_tasks])

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Forgets the places of finished steps."""
        self._positions = {key: position for key, position in self._positions.items() if key[0] > step}

    def holds(self, task: Task) -> bool:
        """Returns True if a task with the same key is trained on or held out."""
        return task.key in self._keys

    def label(self, task: Task) -> str:
        """Returns "", as the source has one part."""
        return ""

    def metrics(self) -> Mapping[str, float]:
        """Returns `epochs`: how often each task was returned, on average."""
        return {"epochs": round(self.loader.position / len(self.loader), 4)}

    def state(self) -> Mapping[str, JSON]:
        """Returns the state of the loader, and the positions of the tasks of future steps."""
        handed = [[step, place, position] for (step, place), position in self._positions.items()]
        return {"loader": self.loader.state(), "handed": handed}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`; raises ConfigError for the state of other tasks."""
        self.loader.load(cast(Mapping[str, JSON], state["loader"]))
        handed = cast(Sequence[Sequence[int]], state["handed"])
        self._positions = {(step, place): position for step, place, position in handed}

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(task.key for task in (*self.loader.tasks, *self._held_out))

    def _position(self, step: int, place: int) -> int:
        """Returns the position of a place's task, the next one for a new place."""
        if (step, place) not in self._positions:
            self._positions[step, place] = self.loader.position
            self.loader.position += 1
        return self._positions[step, place]


def by_level(tasks: Sequence[Task], path: str, values: Sequence[int | float | str]) -> dict[str, list[Task]]:
    """Returns the tasks whose option at `path` (such as `extra_info.difficulty`) is one of the values, by its text.

    Raises ConfigError for a value that no task has.
    """
    tasks_by_value: dict[str, list[Task]] = {str(value): [] for value in values}
    for task in tasks:
        option: JSON = task.options
        for name in path.split("."):
            option = option.get(name) if isinstance(option, Mapping) else None
        if str(option) in tasks_by_value:
            tasks_by_value[str(option)].append(task)
    if empty := [value for value, own in tasks_by_value.items() if not own]:
        raise ConfigError(f"no training task has {path}={empty[0]}: curriculum.values are those of the tasks' options")
    return tasks_by_value
