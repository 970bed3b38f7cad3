"""Groups without a signal are replaced in the order of their tasks, failed episodes say nothing, and a cap ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentgym.trainers.tasks.filtering import Filter, StepGroups, fill_step, is_live, success_rate
from agentgym.trajectory import Group
from agentgym.types import Task

Ended = Callable[..., Group]
LIVE, DEAD, FAILED = [0.0, 1.0], [1.0, 1.0], [None, 1.0]


def fill(ended: Ended, results: Sequence[Sequence[float | None]], **options: Any) -> tuple[StepGroups, list[int]]:
    """A step over groups that end as `results` say, and how many groups each round played."""
    rounds = []

    async def play(num_groups: int, before: Sequence[Group]) -> list[Group]:
        rounds.append(num_groups)
        places = range(len(before), len(before) + num_groups)
        return [ended(Task("X", place), results[place], key=f"1/{place}") for place in places]

    settings = {"mode": "reward", "max_refills": 8} | options
    return asyncio.run(fill_step(play, 3, **settings)), rounds


def test_each_round_plays_as_many_groups_as_lack_a_signal(ended: Ended) -> None:
    step, rounds = fill(ended, [LIVE, DEAD, DEAD, DEAD, LIVE, LIVE])
    assert rounds == [3, 2, 1]
    assert [group.id for group in step.kept] == ["1/0", "1/4", "1/5"]
    assert [group.id for group in step.groups] == [f"1/{place}" for place in range(6)]
    assert step.metrics() == {"filtered_groups": 3, "refill_episodes": 6}


def test_the_cap_leaves_the_groups_that_there_are(ended: Ended) -> None:
    step, rounds = fill(ended, [LIVE, *[DEAD] * 20], max_refills=2)
    assert rounds == [3, 2, 2]
    assert [group.id for group in step.kept] == ["1/0"]
    assert step.num_filtered == 6


def test_a_group_whose_episodes_failed_is_replaced_and_not_called_filtered(ended: Ended) -> None:
    step, _ = fill(ended, [LIVE, FAILED, [None, None], LIVE, LIVE])
    assert [group.id for group in step.kept] == ["1/0", "1/3", "1/4"]
    assert step.num_filtered == 0 and step.refill_episodes == 4


def test_without_a_filter_nothing_is_left_out_and_nothing_is_said(ended: Ended) -> None:
    step, rounds = fill(ended, [DEAD, DEAD, FAILED], mode="off")
    assert rounds == [3] and step.kept == step.groups and not step.metrics()


@pytest.mark.parametrize(
    ("mode", "rewards", "success", "live"),
    [
        ("reward", [0.1, 0.3], [True, True], True),
        ("success", [0.1, 0.3], [True, True], False),
        ("reward", [0.5, 0.5], [True, False], False),
        ("success", [0.5, 0.5], [True, False], True),
        ("reward", [0.5, 0.5, None], [True, True, False], False),
        ("reward", [0.5, None, 0.0], [True, False, False], True),
    ],
)
def test_a_group_is_live_by_what_is_compared(
    mode: Filter, rewards: list[float | None], success: list[bool], live: bool, ended: Ended
) -> None:
    assert is_live(ended(Task("X", 1), rewards, success=success), mode) is live


def test_the_success_of_a_group_is_that_of_the_episodes_with_a_reward(ended: Ended) -> None:
    assert success_rate(ended(Task("X", 1), [1.0, 0.0, None, 1.0])) == pytest.approx(2 / 3)
    assert success_rate(ended(Task("X", 1), [None, None])) is None
