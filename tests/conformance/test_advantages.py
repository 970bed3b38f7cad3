"""Case 7: a group of one, and groups whose rewards are equal."""

from __future__ import annotations

import pytest

from agentgym.errors import ConfigError
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

credits = pytest.importorskip("agentgym.trainers.batch.credits", reason="needs torch")


def group_of(*rewards: float) -> Group:
    task = Task("X-v0", 0)
    row = Row((TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-0.5,), (0,))))
    members = [
        Trajectory(
            task,
            "0",
            member,
            (row,),
            (Turn(Message("assistant", ""), reward),),
            Status.COMPLETED,
            StopReason.TERMINATED,
        )
        for member, reward in enumerate(rewards)
    ]
    return Group("0", task, tuple(members))


@pytest.mark.parametrize("reward", [0.7, 100.1, 1 / 3, -0.1, 0.0])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_case_7_equal_rewards_give_exactly_zero(reward: float, estimator: str) -> None:
    (credit,) = credits.credit_groups([group_of(*[reward] * 15)], estimator)
    assert credit.means == (0.0,) * 15
    assert credit.dead


def test_case_7_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="group of one"):
        credits.credit_groups([group_of(1.0)], "grpo")
