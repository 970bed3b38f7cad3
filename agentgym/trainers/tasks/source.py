"""Where a run's tasks come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.rollout.seeds import derive
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["EnvTasks", "TaskSource"]


class TaskSource(Protocol):
    """Gives training tasks by step, and the held-out ones of evaluations; may change its mind by what came of them.

    A step's tasks stand at places: `range(0, 8)` are its first eight, and where groups are replaced, `range(8, 10)` are
    the next two. Where groups are played ahead, a `step` here is a portion of so many tasks, and portions are asked
    for before the steps that learn from them.
    """

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """The tasks at these places of a step; the same ones however often asked, until the step before is finished."""

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out tasks, none of which is ever trained on."""

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Takes note of all groups that were played for an optimizer step, also of those it did not learn from."""

    def holds(self, task: Task) -> bool:
        """Whether a task, for training or held out, is of this source."""

    def label(self, task: Task) -> str:
        """What reports call the part of the source that a task is of; "" for a source of one part."""

    def metrics(self) -> Mapping[str, float]:
        """What `metrics.jsonl` says of the step that was finished last, by name."""

    def state(self) -> Mapping[str, JSON]:
        """What `load` takes: with it, a new source of the same settings goes on exactly where this one is."""

    def load(self, state: Mapping[str, JSON]) -> None:
        """Goes on from a `state`."""


@dataclass(frozen=True)
class EnvTasks:
    """Tasks of one environment, whose seeds are all there is to them.

    Seeds below EVAL_SEED_START ask for training tasks, the others for held-out ones, and a reset gives no task of the
    other side (`envs/task_split.py`).

    Nothing that is played changes them, so there is no state.
    """

    env: str
    run_seed: int
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Fresh seeds, whatever the number of tasks in a step."""
        seeds = [derive(self.run_seed, "task", step, place) % EVAL_SEED_START for place in places]
        return [Task(self.env, seed, kwargs=self.env_kwargs) for seed in seeds]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """The seeds that `agentgym eval` plays."""
        return [Task(self.env, EVAL_SEED_START + number, kwargs=self.env_kwargs) for number in range(num_tasks)]

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Changes nothing."""

    def holds(self, task: Task) -> bool:
        """By environment and keywords."""
        return task.env_id == self.env and dict(task.kwargs) == dict(self.env_kwargs)

    def label(self, task: Task) -> str:
        """It has one part."""
        return ""

    def metrics(self) -> Mapping[str, float]:
        """Nothing beside what the step's own metrics say."""
        return {}

    def state(self) -> Mapping[str, JSON]:
        """None."""
        return {}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Changes nothing."""
