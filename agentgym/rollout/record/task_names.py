"""The names of the tasks that were played, equal for equal tasks; evaluations take them as independent draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from agentgym.types import Task

if TYPE_CHECKING:  # records are named without numpy, which trajectories hold their ids in
    from agentgym.trajectory import Trajectory

__all__ = ["TaskIdentity", "distinct_names", "task_names"]


class TaskIdentity(NamedTuple):
    """The key of a task, the environment with its keywords that it is of, and the digest of its content if known."""

    key: str
    env: str
    digest: str | None

    @classmethod
    def of_task(cls, task: Task, digest: object) -> TaskIdentity:
        """Returns the identity of a task whose record has this `task_digest`."""
        env = replace(task, seed=0, options={}).key
        return cls(task.key, env, None if digest is None else str(digest))


def task_names(trajectories: Sequence[Trajectory]) -> list[str]:
    """Returns the name of each trajectory's task, equal for equal tasks, whatever their seeds (`info["task_digest"]`).

    If an environment's tasks all have one digest, they cannot be told apart by it and are named by their seeds.
    """
    return distinct_names([TaskIdentity.of_task(each.task, each.info.get("task_digest")) for each in trajectories])


def distinct_names(tasks: Sequence[TaskIdentity]) -> list[str]:
    """Returns the names of `task_names` for the tasks of an evaluation's episodes."""
    digests = {task.key: task.digest for task in tasks if task.digest is not None}
    digests_by_env: dict[str, set[str]] = {}
    for task in tasks:
        if task.key in digests:
            digests_by_env.setdefault(task.env, set()).add(digests[task.key])
    names = []
    for task in tasks:
        digest = digests.get(task.key)
        has_digest = digest is not None and len(digests_by_env[task.env]) > 1
        names.append(f"{task.env}{digest}" if has_digest else task.key)
    return names
