"""Groups whose episodes ended as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from agentgym.trajectory import Group, Status, StopReason, Trajectory, Turn
from agentgym.types import Message, Task


def group_of(task: Task, rewards: Sequence[float | None], key: str = "1/0", success: Sequence[bool] = ()) -> Group:
    members = []
    for member, reward in enumerate(rewards):
        failed = reward is None
        members.append(
            Trajectory(
                task=task,
                group=key,
                member=member,
                rows=(),
                turns=() if failed else (Turn(Message("assistant", "x"), reward),),
                status=Status.ENV_ERROR if failed else Status.COMPLETED,
                stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
                metrics={"success": float(success[member])} if success else {},
                error="the wire is cut" if failed else None,
            )
        )
    return Group(key, task, tuple(members))


@pytest.fixture
def ended() -> Callable[..., Group]:
    """`ended(task, rewards, key="1/0", success=())` is a group; a reward of None is an episode that failed."""
    return group_of
