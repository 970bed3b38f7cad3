"""Names of the tasks that were played, equal for equal tasks: what evaluations take as their independent draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentgym.trajectory import Trajectory

__all__ = ["task_names"]


def task_names(trajectories: Sequence[Trajectory]) -> list[str]:
    """The name of each trajectory's task, equal for equal tasks, whatever their seeds (`info["task_digest"]`).

    Where an environment's tasks all have one digest, nothing tells them apart, and they are named by their seeds.
    """
    digests = {one.task.key: str(one.info["task_digest"]) for one in trajectories if "task_digest" in one.info}
    found: dict[str, set[str]] = {}
    for one in trajectories:
        if one.task.key in digests:
            found.setdefault(_env_of(one), set()).add(digests[one.task.key])
    names = []
    for one in trajectories:
        env, digest = _env_of(one), digests.get(one.task.key)
        names.append(f"{env}{digest}" if digest is not None and len(found[env]) > 1 else one.task.key)
    return names


def _env_of(trajectory: Trajectory) -> str:
    """The environment of a task, with its keywords."""
    return replace(trajectory.task, seed=0, options={}).key
