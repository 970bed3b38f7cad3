"""The names of the tasks that were played, equal for equal tasks; evaluations take them as independent draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentgym.trajectory import Trajectory

__all__ = ["task_names"]


def task_names(trajectories: Sequence[Trajectory]) -> list[str]:
    """Returns the name of each trajectory's task, equal for equal tasks, whatever their seeds (`info["task_digest"]`).

    If an environment's tasks all have one digest, they cannot be told apart by it and are named by their seeds.
    """
    digests = {
        trajectory.task.key: str(trajectory.info["task_digest"])
        for trajectory in trajectories
        if "task_digest" in trajectory.info
    }
    digests_by_env: dict[str, set[str]] = {}
    for trajectory in trajectories:
        if trajectory.task.key in digests:
            digests_by_env.setdefault(_env_of(trajectory), set()).add(digests[trajectory.task.key])
    names = []
    for trajectory in trajectories:
        env, digest = _env_of(trajectory), digests.get(trajectory.task.key)
        names.append(f"{env}{digest}" if digest is not None and len(digests_by_env[env]) > 1 else trajectory.task.key)
    return names


def _env_of(trajectory: Trajectory) -> str:
    """Returns the environment of a task, with its keywords."""
    return replace(trajectory.task, seed=0, options={}).key
