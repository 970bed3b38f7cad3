"""Where a run's tasks come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agentgym.envs.seeds import EVAL_SEED_START
from agentgym.rollout.seeds import derive
from agentgym.types import JSON, Task

__all__ = ["EnvTasks", "TaskSource"]


class TaskSource(Protocol):
    """Gives training tasks by step, and the held-out ones of evaluations."""

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """The tasks at these places of a step, `range(0, 8)` for its first eight; the same ones however often asked."""

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out tasks, none of which is ever trained on."""


@dataclass(frozen=True)
class EnvTasks:
    """Tasks of one environment, whose seeds are all there is to them; training never reaches the held-out seeds."""

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
