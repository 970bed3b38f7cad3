"""Given tasks come each once an epoch, in an order of the seed, through refills and resumptions."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.data.loader import TaskLoader
from agentgym.errors import ConfigError
from agentgym.trainers.tasks import FixedTasks, PracticeConfig
from agentgym.trainers.tasks.choice import fixed_source
from agentgym.trainers.tasks.practice import CurriculumConfig
from agentgym.types import Task

TASKS = [Task("Prompt-v0", n, options={"extra_info": {"level": n % 2}}) for n in range(10)]
HELD_OUT = [Task("Prompt-v0", 100 + n) for n in range(3)]


def given_tasks(seed: int = 0) -> FixedTasks:
    return FixedTasks(TaskLoader(TASKS, seed), HELD_OUT)


def taken(source: FixedTasks, sizes: list[int], begin: int = 1) -> list[int]:
    """The seeds of steps of so many tasks, each asked for in two portions, as refills do."""
    seeds = []
    for step, size in enumerate(sizes, start=begin):
        tasks = source.train_tasks(step, range(size // 2)) + source.train_tasks(step, range(size // 2, size))
        seeds += [task.seed for task in tasks]
        source.finish(step, [])
    return seeds


@given(st.lists(st.integers(1, 14), min_size=1, max_size=8), st.integers(0, 5))
def test_any_cut_into_steps_gives_the_same_epochs(sizes: list[int], seed: int) -> None:
    seeds = taken(given_tasks(seed), sizes)
    assert seeds == taken(given_tasks(seed), [1] * sum(sizes))
    for start in range(0, len(seeds) - 9, 10):
        assert sorted(seeds[start : start + 10]) == list(range(10))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    seeds = taken(given_tasks(), [10, 10])
    assert seeds[:10] != seeds[10:] and seeds[:10] != list(range(10))
    assert seeds[:10] != taken(given_tasks(1), [10])


def test_a_resumed_source_goes_on_also_behind_tasks_that_were_asked_for_ahead() -> None:
    source, again = (given_tasks() for _ in range(2))
    taken(source, [4, 7])
    ahead = source.train_tasks(3, range(4))
    again.load(json.loads(json.dumps(source.state())))
    assert again.train_tasks(3, range(4)) == ahead == source.train_tasks(3, range(4))
    assert taken(again, [6, 6], begin=3) == taken(source, [6, 6], begin=3)
    with pytest.raises(ConfigError, match="10 other tasks, and there are 9 here"):
        FixedTasks(TaskLoader(TASKS[:9]), ()).load(source.state())


def test_held_out_tasks_are_as_many_as_there_are() -> None:
    source = given_tasks()
    assert source.eval_tasks(2) == HELD_OUT[:2] and source.eval_tasks(9) == HELD_OUT
    assert source.holds(HELD_OUT[0]) and source.holds(TASKS[0]) and not source.holds(Task("Prompt-v0", 50))


def test_a_curriculum_over_the_difficulty_of_given_tasks() -> None:
    def levels(**settings: Any) -> Counter[int]:
        curriculum = CurriculumConfig(by="extra_info.level", values=(0, 1), **settings)
        source = fixed_source(PracticeConfig(curriculum=curriculum), TASKS, HELD_OUT, run_seed=0)
        assert source.eval_tasks(3) == HELD_OUT
        return Counter(task.seed % 2 for task in source.train_tasks(1, range(10)))

    assert levels(method="steps") == {0: 10}
    assert set(levels(method="learnability")) == {0, 1}
    curriculum = CurriculumConfig(method="steps", by="extra_info.level", values=(0, 7))
    with pytest.raises(ConfigError, match=r"no training task has extra_info.level ?= ?7"):
        fixed_source(PracticeConfig(curriculum=curriculum), TASKS, HELD_OUT, run_seed=0)


def test_no_tasks_and_a_mix_of_given_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one task, got none"):
        fixed_source(PracticeConfig(), (), HELD_OUT, run_seed=0)
    with pytest.raises(ConfigError, match=r"leave practice\.mix out"):
        fixed_source(PracticeConfig(mix={"A": 1}), TASKS, HELD_OUT, run_seed=0)
