"""Tasks that went badly come back, as often as the settings say and no more are remembered than that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.trainers.tasks import CurriculumConfig, PracticeConfig, ReplayConfig, TaskSource, make_source
from agentgym.trajectory import Group
from agentgym.types import Task

Ended = Callable[..., Group]
Judge = Callable[[Task], list[float | None]]


def game(*, practice: dict[str, Any] | None = None, **replay: Any) -> TaskSource:
    settings = PracticeConfig(replay=ReplayConfig(**{"share": 0.25, **replay}), **(practice or {}))
    return make_source(settings, "TextGame-v0", {}, run_seed=0, tasks_per_step=8)


def play(source: TaskSource, ended: Ended, step: int, judge: Judge) -> list[str]:
    """One step of eight groups; the keys of its tasks."""
    tasks = source.train_tasks(step, range(8))
    source.finish(step, [ended(task, judge(task), key=f"{step}/{n}") for n, task in enumerate(tasks)])
    return [task.key for task in tasks]


def lost(_: Task) -> list[float | None]:
    return [0.0, 0.0]


def won(_: Task) -> list[float | None]:
    return [1.0, 1.0]


def test_a_quarter_of_a_step_is_earlier_failures_the_oldest_first(ended: Ended) -> None:
    source = game()
    first, second, third = (play(source, ended, step, lost) for step in (1, 2, 3))
    assert len(set(first)) == 8
    assert [second[3], second[7]] == first[:2] and [third[3], third[7]] == first[2:4]
    assert source.metrics() == {"replayed_groups": 2, "replay_memory": 20, "replay_success": 0.0}


def test_what_is_solved_is_forgotten(ended: Ended) -> None:
    source = game()
    first = play(source, ended, 1, lost)
    for step in range(2, 6):
        assert set(play(source, ended, step, won)) & set(first)
    assert source.metrics()["replay_memory"] == 0
    assert not set(play(source, ended, 6, won)) & set(first)
    assert source.metrics()["replayed_groups"] == 0


def test_a_task_comes_back_so_often_and_not_for_ever(ended: Ended) -> None:
    source = game(max_replays=2)
    bad = source.train_tasks(1, range(1))[0].key

    def judge(task: Task) -> list[float | None]:
        return lost(task) if task.key == bad else won(task)

    seen = [key for step in range(1, 12) for key in play(source, ended, step, judge)]
    assert seen.count(bad) == 3, "once as new, twice again"


def test_bounds_choose_the_tasks_that_come_back(ended: Ended) -> None:
    results: list[list[float | None]] = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [None, None]]
    for bounds, expected in (({}, {0, 1}), ({"success": (0.01, 0.5)}, {1}), ({"success": (0.0, 0.0)}, {0})):
        source = game(share=0.5, **bounds)
        tasks = source.train_tasks(1, range(4))
        source.finish(1, [ended(task, results[n], key=f"1/{n}") for n, task in enumerate(tasks)])
        again = {task.key for task in source.train_tasks(2, range(8))}
        assert {n for n, task in enumerate(tasks) if task.key in again} == expected


def test_the_oldest_is_forgotten_beyond_the_memory(ended: Ended) -> None:
    source = game(memory=3)
    first = play(source, ended, 1, lost)
    assert source.metrics()["replay_memory"] == 3
    assert [task.key for task in source.train_tasks(2, range(8))][3] == first[5]


def test_tasks_are_the_same_when_asked_for_again_and_after_a_resumption(ended: Ended) -> None:
    source, again = game(), game()
    play(source, ended, 1, lost)
    ahead = source.train_tasks(2, range(8))
    again.load(json.loads(json.dumps(source.state(), default=dict)))
    assert source.train_tasks(2, range(8)) == ahead == again.train_tasks(2, range(8))
    for step in range(2, 6):
        assert play(source, ended, step, lost) == play(again, ended, step, lost)
    assert source.state() == again.state()


def test_a_curriculum_hears_of_new_tasks_alone(ended: Ended) -> None:
    curriculum = CurriculumConfig(
        method="steps", values=(1, 2), settings={"window": 6, "raise_at": 0.9, "lower_at": 0.0}
    )
    source = game(practice={"curriculum": curriculum})
    first = play(source, ended, 1, lost)
    # two of the eight are replayed and lost again; the six new ones alone are enough to go up
    play(source, ended, 2, lambda task: lost(task) if task.key in first else won(task))
    new = [task for task in source.train_tasks(3, range(8)) if task.key not in first]
    assert {task.kwargs["level"] for task in new} == {2}


@pytest.mark.parametrize(
    "settings", [{"share": 1.0}, {"share": -0.1}, {"success": (0.6, 0.5)}, {"memory": 0}, {"max_replays": 0}]
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"replay"):
        ReplayConfig(**settings)
