"""The plan of a bounded staleness, against every order in which groups may come to be finished."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError, TrainingHalted
from agentgym.rollout.sampling.staleness import StalenessPlan, ages, staleness


@given(
    per_step=st.integers(1, 5),
    bound=st.integers(0, 5),
    num_steps=st.integers(1, 12),
    draw=st.randoms(use_true_random=False),
)
def test_groups_finished_in_any_order_are_used_in_time_and_fill_every_step(
    per_step: int, bound: int, num_steps: int, draw: object
) -> None:
    plan = StalenessPlan(per_step, bound)
    began: list[tuple[int, int]] = []  # the version that each group began at, and when it is due

    def begin_some(*, all_of_them: bool = False) -> None:
        while plan.has_room and (all_of_them or draw.random() < 0.7):  # type: ignore[attr-defined]
            began.append((plan.version, plan.begin()))

    for version in range(num_steps):
        begin_some(all_of_them=len(began) < per_step)
        choice, groups = plan.choose(per_step), []
        draw.shuffle(began)  # type: ignore[attr-defined]  # the order in which they come to be finished
        for group in tuple(began):
            if len(groups) < per_step and choice.takes(group[1]):
                groups.append(group)
                began.remove(group)
            if draw.random() < 0.3:  # type: ignore[attr-defined]
                begin_some()  # at the same time others begin
        for group in tuple(began):  # those that began meanwhile
            if len(groups) < per_step and choice.takes(group[1]):
                groups.append(group)
                began.remove(group)
        assert len(groups) == per_step, "a step could not be filled from what is ahead"
        assert all(version - first <= bound for first, _ in groups)
        plan.take([due for _, due in groups])
        begin_some()  # while the step learns
        plan.advance(version + 1)
        assert plan.num_ahead == len(began) <= plan.max_ahead


def test_with_a_bound_of_0_nothing_begins_while_a_step_learns() -> None:
    plan = StalenessPlan(2, 0)
    assert plan.has_room
    dues = [plan.begin(), plan.begin()]
    assert dues == [0, 0] and not plan.has_room
    plan.take(dues)
    assert not plan.has_room
    plan.advance(1)
    assert plan.has_room


def test_groups_that_replace_some_of_a_step_are_there_to_be_taken() -> None:
    plan = StalenessPlan(2, 1)
    dues = [plan.begin() for _ in range(4)]
    assert not plan.has_room
    plan.take(dues[:2])
    assert not plan.has_room, "the two others fill the next step"
    choice = plan.choose(1)
    assert choice.takes(dues[2])
    plan.take(dues[2:3])
    assert plan.has_room, "a place of the next step is free again"


def test_a_group_that_cannot_wait_keeps_its_place() -> None:
    plan = StalenessPlan(2, 2)
    old = plan.begin()
    plan.take([plan.begin(), plan.begin()])
    plan.advance(1)
    new = [plan.begin() for _ in range(3)]
    plan.take(new[:2])
    plan.advance(2)
    choice = plan.choose(2)
    assert choice.takes(new[2])
    assert not choice.takes(plan.begin()), "the last place is the old group's"
    assert choice.takes(old)


def test_an_update_that_comes_before_the_steps_it_counts_is_refused() -> None:
    plan = StalenessPlan(1, 1)
    plan.begin()
    plan.advance(1)
    with pytest.raises(TrainingHalted, match="before a step had taken 1 groups that may be 1 updates old"):
        plan.advance(2)
    with pytest.raises(ConfigError, match="never fall"):
        plan.advance(0)


def test_bounds_that_make_no_sense_are_refused() -> None:
    for sizes in ((0, 1), (1, -1)):
        with pytest.raises(ConfigError, match="at least"):
            StalenessPlan(*sizes)


def test_groups_without_a_token_are_of_no_age() -> None:
    assert staleness([], 3) == {"staleness_mean": 0.0, "staleness_max": 0}
    assert len(ages([], 3)) == 0
