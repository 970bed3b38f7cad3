"""A mix has the proportions of its weights, in each step to a whole place and over the steps exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.tasks import CurriculumConfig, MixedTasks, PracticeConfig, TaskSource, make_source
from agentgym.trainers.tasks.mix import apportion, read_mix
from agentgym.trajectory import Group
from agentgym.types import Task


def mixed(mix: dict[str, Any], tasks: int = 8, **practice: Any) -> TaskSource:
    return make_source(PracticeConfig(mix=mix, **practice), next(iter(mix)), {}, run_seed=3, tasks_per_step=tasks)


def envs(tasks: list[Task]) -> Counter[str]:
    return Counter(task.env_id for task in tasks)


weights = st.lists(st.integers(1, 50) | st.floats(0.01, 50), min_size=1, max_size=6)


@given(weights, st.integers(1, 40), st.integers(1, 12))
def test_quotas_are_rounded_within_a_place_and_their_sums_do_not_drift(
    weights: list[float], places: int, steps: int
) -> None:
    past, total = [0] * len(weights), sum(weights)
    for step in range(1, steps + 1):
        shares = apportion(weights, places, past)
        assert sum(shares) == places
        past = [before + share for before, share in zip(past, shares, strict=True)]
        for weight, share, so_far in zip(weights, shares, past, strict=True):
            assert abs(share - places * weight / total) < 1 + 1e-6
            assert abs(so_far - step * places * weight / total) < len(weights)


@given(weights, st.integers(1, 40))
def test_one_step_is_apportioned_by_the_largest_remainders(weights: list[float], places: int) -> None:
    total, shares = sum(weights), apportion(weights, places)
    left = [places * weight / total - share for weight, share in zip(weights, shares, strict=True)]
    # who got less than the quota has a remainder; nobody who was rounded up had a smaller one
    assert max(left) <= min(left) + 1 + 1e-6


def test_two_to_one_over_eight_places_is_5_3_and_16_8_over_three_steps() -> None:
    source = mixed({"TextGame-v0": 2, "GuessNumber-v0": 1})
    steps = [source.train_tasks(step, range(8)) for step in (1, 2, 3)]
    assert envs(steps[0]) == {"TextGame-v0": 5, "GuessNumber-v0": 3}
    assert sum((envs(tasks) for tasks in steps), Counter()) == {"TextGame-v0": 16, "GuessNumber-v0": 8}
    assert len({task.key for tasks in steps for task in tasks}) == 24
    assert steps[1] == source.train_tasks(2, range(8)), "the same ones however often asked"
    assert steps[1][5:7] == source.train_tasks(2, range(5, 7))


def test_places_that_replace_groups_have_the_same_proportions_and_new_tasks() -> None:
    source = mixed({"TextGame-v0": 3, "GuessNumber-v0": 1}, tasks=4)
    tasks = source.train_tasks(1, range(12))
    assert envs(tasks[4:8]) == envs(tasks[8:]) == {"TextGame-v0": 3, "GuessNumber-v0": 1}
    assert len({task.key for task in tasks}) == 12


def test_each_environment_has_its_own_keywords_levels_and_name() -> None:
    mix = {
        "easy": {"env": "TextGame-v0", "kwargs": {"level": 1}, "levels": [], "weight": 0.5},
        "GuessNumber-v0": {"levels": [1, 2]},
        "TextGame-v0": 1,
    }
    curriculum = {"method": "learnability", "values": [3, 4]}
    settings = {"env": "TextGame-v0", "tasks": 64, "practice": {"mix": mix, "curriculum": curriculum}}
    config = config_from_mapping(TrainConfig, settings)
    source = make_source(config.practice, config.env, {}, run_seed=0, tasks_per_step=64)
    seen: dict[str, set[object]] = {}
    for task in source.train_tasks(1, range(64)):
        seen.setdefault(source.label(task), set()).add(task.kwargs["level"])
    assert seen == {"easy": {1}, "GuessNumber-v0": {1, 2}, "TextGame-v0": {3, 4}}
    assert Counter(source.label(task) for task in source.eval_tasks(10)) == {
        "easy": 2,
        "GuessNumber-v0": 4,
        "TextGame-v0": 4,
    }


def test_a_mix_reports_each_environment(ended: Callable[..., Group]) -> None:
    source = mixed({"TextGame-v0": 1, "GuessNumber-v0": 1}, tasks=4)
    results = {"TextGame-v0": [1.0, 0.0, None], "GuessNumber-v0": [None, None, None]}
    groups = [ended(task, results[task.env_id], key=f"1/{n}") for n, task in enumerate(source.train_tasks(1, range(4)))]
    source.finish(1, groups)
    assert source.metrics() == {
        "episodes/TextGame-v0": 6,
        "success/TextGame-v0": 0.5,
        "reward_mean/TextGame-v0": 0.5,
        "episodes/GuessNumber-v0": 6,
    }


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"A": 0}, "the weight of 'A' is a number above 0"),
        ({"A": True}, "the weight of 'A' is a number above 0"),
        ({"A": "many"}, "the weight of 'A' is a number above 0"),
        ({"A": {"wieght": 1}}, "unknown setting 'wieght': did you mean 'weight'"),
        ({"A": {"kwargs": [1]}}, "kwargs of 'A' are names with values"),
        ({"A": 1, "b": {"env": "A"}}, "'A' and 'b' are the same environment"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named(mix: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_mix(mix)


def test_entries_that_share_tasks_are_refused() -> None:
    mix = {"TextGame-v0": {"levels": [1, 2]}, "hard": {"env": "TextGame-v0", "kwargs": {"level": 2}, "levels": []}}
    with pytest.raises(ConfigError, match="'hard' and 'TextGame-v0' have tasks in common"):
        mixed(mix, curriculum=CurriculumConfig(method="steps", values=(1, 2)))


def test_a_mix_that_env_or_its_keywords_contradict_is_refused() -> None:
    practice = PracticeConfig(mix={"TextGame-v0": 1})
    with pytest.raises(ConfigError, match="env 'X' is not in the mix"):
        TrainConfig(env="X", practice=practice)
    with pytest.raises(ConfigError, match="in a mix each has its own"):
        TrainConfig(env="TextGame-v0", env_kwargs={"level": 1}, practice=practice)


def test_the_state_of_a_mix_is_that_of_its_parts(ended: Callable[..., Group]) -> None:
    replay = config_from_mapping(PracticeConfig, {"replay": {"share": 0.5}}).replay
    first, second = (mixed({"TextGame-v0": 1, "GuessNumber-v0": 1}, tasks=8, replay=replay) for _ in range(2))
    first.finish(1, [ended(task, [0.0, 0.0], key=f"1/{n}") for n, task in enumerate(first.train_tasks(1, range(8)))])
    second.load(first.state())
    assert isinstance(first, MixedTasks)
    assert first.train_tasks(2, range(12)) == second.train_tasks(2, range(12))
