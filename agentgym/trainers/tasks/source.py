"""Sources of a run's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.rollout.seeds import derive
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["EnvTasks", "TaskSource", "task_to_json"]


class TaskSource(Protocol):
    """A source of training tasks by step, and of the held-out tasks of evaluations; it may adapt to the results.

    A step's tasks have places: `range(0, 8)` are its first eight, and if groups are replaced, `range(8, 10)` are the
    next two. If groups are played ahead, a `step` here is a portion of so many tasks, and portions are requested before
    the steps that learn from them.
    """

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns the tasks at these places of a step; repeated calls agree until the step before is finished."""

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns the first `num_tasks` held-out tasks, none of which is ever trained on."""

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Takes all groups that were played for an optimizer step, including those that it did not learn from."""

    def holds(self, task: Task) -> bool:
        """Returns True if a task, for training or held out, is of this source."""

    def label(self, task: Task) -> str:
        """Returns the name in reports of the part of the source that a task is of; "" for a source of one part."""

    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics of the step that was finished last, by their names in `metrics.jsonl`."""

    def state(self) -> Mapping[str, JSON]:
        """Returns the state that `load` takes: with it, a new source of the same settings goes on exactly from here."""

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""


@dataclass(frozen=True)
class EnvTasks:
    """Tasks of one environment, which differ in their seeds alone.

    Seeds below EVAL_SEED_START are training tasks, the others held-out ones, and a reset returns no task of the other
    side (`envs/task_split.py`).

    The results do not change the tasks, so there is no state.
    """

    env: str
    run_seed: int
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns tasks with fresh seeds, whatever the number of tasks in a step."""
        seeds = [derive(self.run_seed, "task", step, place) % EVAL_SEED_START for place in places]
        return [Task(self.env, seed, kwargs=self.env_kwargs) for seed in seeds]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns tasks with the seeds that `agentgym eval` plays."""
        return [Task(self.env, EVAL_SEED_START + number, kwargs=self.env_kwargs) for number in range(num_tasks)]

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Changes nothing."""

    def holds(self, task: Task) -> bool:
        """Returns True if the task has this environment and these keywords."""
        return task.env_id == self.env and dict(task.kwargs) == dict(self.env_kwargs)

    def label(self, task: Task) -> str:
        """Returns "", as the source has one part."""
        return ""

    def metrics(self) -> Mapping[str, float]:
        """Returns nothing in addition to the step's own metrics."""
        return {}

    def state(self) -> Mapping[str, JSON]:
        """Returns an empty state."""
        return {}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Changes nothing."""


def task_to_json(task: Task) -> dict[str, JSON]:
    """Returns the fields of a task for the state of a source; `Task(**fields)` is the task again."""
    return {"env_id": task.env_id, "seed": task.seed, "options": task.options, "kwargs": task.kwargs}
