"""The door for a choice of tasks of one's own: curricula, tasks that depend on results, generated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentgym.errors import ConfigError
from agentgym.loading import Wanted, load_named
from agentgym.settings.functions import convert_function_errors
from agentgym.trainers.tasks.source import TaskSource
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["TaskSampler", "own_sampler"]

TASK_SAMPLER = Wanted(
    noun="task sampler",
    example="Class",
    hint="Derive it from agentgym.trainers.TaskSampler.",
    new="`agentgym new sampler NAME` writes one to start from",
    fits=lambda value: isinstance(value, type) and issubclass(value, TaskSampler),
)


class TaskSampler:
    """Chooses the tasks of each step. Derive a class, override what it decides, and name it in `practice.sampler`.

    As it is, it gives the tasks of `source`, which the other settings describe: an environment, a mix, a curriculum or
    the rows of data. `seed` is the run's; with random numbers derived from it and from the step, runs repeat.
    """

    def __init__(self, source: TaskSource, seed: int) -> None:
        self.source = source
        self.seed = seed

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns a task for each of these places of a step (from 1), the same ones when it is called again.

        A task may be any: `Task("TextGame-v0", seed=7, kwargs={"level": 2})`, or a prompt that was made just now,
        `Task("Prompt-v0", seed=0, options={"messages": [{"role": "user", "content": "2 + 2?"}], "ground_truth": "4"})`.
        Places beyond the number of a step's tasks replace groups that were filtered.
        """
        return self.source.train_tasks(step, places)

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns the first `num_tasks` held-out tasks, none of which is ever trained on."""
        return self.source.eval_tasks(num_tasks)

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Takes all groups of a step before the tasks of the next one are asked for: tasks, rewards, conversations."""
        self.source.finish(step, groups)

    def metrics(self) -> Mapping[str, float]:
        """Returns numbers of the step that was finished last, for `metrics.jsonl`."""
        return self.source.metrics()

    def state(self) -> Mapping[str, JSON]:
        """Returns what a checkpoint keeps; override it together with `load` if the results change later tasks."""
        return self.source.state()

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state` when a run is resumed."""
        self.source.load(state)

    def holds(self, task: Task) -> bool:
        """Returns True: all tasks of a run are the sampler's."""
        return True

    def label(self, task: Task) -> str:
        """Returns the name in reports of the part that a task is of; "" for none."""
        return self.source.label(task)


def own_sampler(place: str, source: TaskSource, seed: int) -> TaskSampler:
    """Returns the sampler that a run names; raises ConfigError for a class that is none."""
    kind = load_named(place, TASK_SAMPLER)
    if not (isinstance(kind, type) and issubclass(kind, TaskSampler)):
        raise ConfigError(f"{place!r} is not a class that derives from agentgym.trainers.TaskSampler")
    with convert_function_errors(place, kind):
        return kind(source, seed)
