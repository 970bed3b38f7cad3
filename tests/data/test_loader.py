"""The order of tasks follows from seed and tasks alone, and goes on after a resumption as it would have."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.data import TaskLoader
from agentgym.errors import ConfigError
from agentgym.types import Task


def tasks(count: int) -> tuple[Task, ...]:
    return tuple(Task("Prompt-v0", number, {"ground_truth": number}) for number in range(count))


@given(st.integers(1, 12), st.booleans(), st.lists(st.integers(0, 30), max_size=6))
def test_portions_of_any_size_are_one_stream(count: int, shuffle: bool, portions: list[int]) -> None:
    loader = TaskLoader(tasks(count), seed=3, shuffle=shuffle)
    stream = [task for size in portions for task in loader.take(size)]
    assert len(stream) == sum(portions)
    assert stream == list(TaskLoader(tasks(count), seed=3, shuffle=shuffle).take(sum(portions)))
    for start in range(0, len(stream) - count + 1, count):
        assert Counter(task.seed for task in stream[start : start + count]) == Counter(range(count))


@given(st.integers(1, 12), st.booleans(), st.lists(st.integers(0, 30), max_size=6), st.integers(0, 40))
def test_a_resumed_loader_goes_on_as_it_would_have(count: int, shuffle: bool, before: list[int], after: int) -> None:
    loader = TaskLoader(tasks(count), seed=1, shuffle=shuffle)
    for size in before:
        loader.take(size)
    resumed = TaskLoader(tasks(count), seed=1, shuffle=shuffle)
    resumed.load(json.loads(json.dumps(loader.state())))
    assert resumed.epoch == loader.epoch
    assert resumed.state() == loader.state()
    assert resumed.take(after) == loader.take(after)


@given(st.integers(1, 12), st.booleans(), st.integers(0, 60), st.integers(0, 9), st.integers(0, 20))
def test_any_place_of_the_stream_may_be_asked_for_at_any_time(
    count: int, shuffle: bool, start: int, size: int, num_before: int
) -> None:
    loader = TaskLoader(tasks(count), seed=2, shuffle=shuffle)
    loader.take(num_before)
    places = range(start, start + size)
    assert loader.at(places) == TaskLoader(tasks(count), seed=2, shuffle=shuffle).take(start + size)[start:]
    assert loader.at(places) == loader.at(places) and loader.position == num_before


def test_what_is_left_of_an_epoch_comes_first() -> None:
    loader = TaskLoader(tasks(5), shuffle=False)
    assert [task.seed for task in loader.take(3)] == [0, 1, 2]
    assert loader.epoch == 0
    assert [task.seed for task in loader.take(4)] == [3, 4, 0, 1]
    assert loader.epoch == 1
    assert len(loader) == 5


def test_epochs_and_seeds_have_orders_of_their_own_and_files_do_not() -> None:
    def order(seed: int, rows: tuple[Task, ...] = tasks(50)) -> list[int]:
        return [task.seed for task in TaskLoader(rows, seed=seed).take(100)]

    assert order(0) == order(0, tasks(50)[::-1])
    assert len({tuple(order(0)[:50]), tuple(order(0)[50:]), tuple(order(1)[:50]), tuple(range(50))}) == 4


def test_every_place_of_an_epoch_is_as_likely_for_every_task() -> None:
    firsts = Counter(TaskLoader(tasks(4), seed=seed).take(1)[0].seed for seed in range(2000))
    assert all(abs(firsts[number] - 500) < 100 for number in range(4)), firsts  # 5 standard deviations


def test_equal_tasks_are_all_dealt_out() -> None:
    loader = TaskLoader((*tasks(2), *tasks(2)))
    assert Counter(task.seed for task in loader.take(4)) == {0: 2, 1: 2}


def test_a_state_of_something_else_is_refused() -> None:
    state = TaskLoader(tasks(4), seed=1).state()
    for other_loader, words in (
        (TaskLoader(tasks(5), seed=1), "that of 4 other tasks, and there are 5 here: the data changed"),
        (TaskLoader(tasks(4), seed=2), "the state has seed=1, and this loader seed=2"),
        (TaskLoader(tasks(4), seed=1, shuffle=False), "shuffle=True, and this loader shuffle=False"),
    ):
        with pytest.raises(ConfigError, match=words):
            other_loader.load(state)
    TaskLoader(tasks(4)[::-1], seed=1).load(state)
    ordered = TaskLoader(tasks(4), shuffle=False).state()
    with pytest.raises(ConfigError, match="the data changed"):
        TaskLoader(tasks(4)[::-1], shuffle=False).load(ordered)
    loader = TaskLoader(tasks(4), seed=1)
    with pytest.raises(ConfigError, match="it has no data, num_tasks"):
        loader.load({"position": 0})
    for wrong in (-1, "two", None):
        with pytest.raises(ConfigError, match="how many tasks were taken as its position, got"):
            loader.load({**state, "position": wrong})


def test_no_tasks_and_negative_portions_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        TaskLoader(())
    with pytest.raises(ConfigError, match="got -1"):
        TaskLoader(tasks(1)).take(-1)
