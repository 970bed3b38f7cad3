"""A curriculum moves with the success of recent groups, from its state and the seed alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.errors import ConfigError
from agentgym.trainers.tasks import CurriculumConfig, PracticeConfig, TaskSource, make_source
from agentgym.trainers.tasks.curriculum import Learnability, Thresholds
from agentgym.trajectory import Group
from agentgym.types import Task

Ended = Callable[..., Group]


def game(method: str, values: tuple[int, ...] = (1, 2, 3), seed: int = 0, **settings: Any) -> TaskSource:
    curriculum = CurriculumConfig(method=method, values=values, settings=settings)  # type: ignore[arg-type]
    practice = PracticeConfig(curriculum=curriculum)
    return make_source(practice, "TextGame-v0", {"level": 3}, run_seed=seed, tasks_per_step=8)


def play(source: TaskSource, ended: Ended, step: int, skill: dict[int, list[float | None]]) -> Counter[object]:
    """One step of eight groups, which end by level as `skill` says; how many each level had."""
    tasks = source.train_tasks(step, range(8))
    source.finish(step, [ended(task, skill[level_of(task)], key=f"{step}/{n}") for n, task in enumerate(tasks)])
    return Counter(task.kwargs["level"] for task in tasks)


def level_of(task: Task) -> int:
    level = task.kwargs["level"]
    assert isinstance(level, int)
    return level


WON: list[float | None] = [1.0] * 4
LOST: list[float | None] = [0.0] * 4
HALF: list[float | None] = [1.0, 0.0, 1.0, 0.0]


def test_steps_goes_up_with_success_stays_in_between_and_comes_back_down(ended: Ended) -> None:
    source = game("steps", window=16)
    seen = [play(source, ended, step, {1: WON, 2: WON, 3: HALF}) for step in range(1, 8)]
    assert [next(iter(step)) for step in seen] == [1, 1, 2, 2, 3, 3, 3]
    back = [play(source, ended, step, {1: WON, 2: HALF, 3: LOST}) for step in range(8, 13)]
    assert [next(iter(step)) for step in back] == [3, 3, 2, 2, 2], (
        "sixteen groups of the hardest, then half of them won"
    )
    assert source.metrics()["level"] == 2 and source.metrics()["level_success_2"] == 0.5


def test_steps_stays_within_its_levels(ended: Ended) -> None:
    source = game("steps", window=1)
    assert {next(iter(play(source, ended, step, {1: LOST}))) for step in range(1, 4)} == {1}
    top = [next(iter(play(source, ended, step, dict.fromkeys((1, 2, 3), WON)))) for step in range(4, 9)]
    assert top == [1, 2, 3, 3, 3]


def test_groups_that_failed_move_nothing(ended: Ended) -> None:
    source = game("steps", window=1)
    assert [next(iter(play(source, ended, step, {1: [None, None]}))) for step in (1, 2, 3)] == [1, 1, 1]


def test_learnability_weighs_levels_by_p_times_one_minus_p() -> None:
    curriculum = Learnability(3, explore=0.1, keep=0.5)
    assert curriculum.shares() == pytest.approx([1 / 3] * 3)
    curriculum.observe([[1.0, 1.0], [0.5, 0.0], []])
    # (2 + 1) / (2 + 2), (0.5 + 1) / (2 + 2), and 1/2 for the level that nobody has played
    scores = [0.75 * 0.25, 0.375 * 0.625, 0.25]
    assert curriculum.shares() == pytest.approx([0.1 / 3 + 0.9 * score / sum(scores) for score in scores])
    curriculum.observe([[], [], [0.0]])
    # half of what was known is forgotten: (1 + 1) / (1 + 2), (0.25 + 1) / (1 + 2), (0 + 1) / (1 + 2)
    rates = [2 / 3, 1.25 / 3, 1 / 3]
    scores = [rate * (1 - rate) for rate in rates]
    assert curriculum.shares() == pytest.approx([0.1 / 3 + 0.9 * score / sum(scores) for score in scores])


def test_learnability_prefers_what_is_solved_half_of_the_time_and_leaves_out_nothing(ended: Ended) -> None:
    source = game("learnability")
    total: Counter[object] = Counter()
    for step in range(1, 61):
        played = play(source, ended, step, {1: WON, 2: HALF, 3: LOST})
        total += played if step > 10 else Counter()
    assert total[2] > 0.55 * total.total() and min(total[1], total[3]) > 0.05 * total.total()


def test_what_a_place_draws_follows_the_shares(ended: Ended) -> None:
    source = game("learnability", explore=1.0)
    drawn = Counter(level_of(task) for task in source.train_tasks(1, range(3000)))
    # a third each: the standard deviation is 26
    assert all(abs(drawn[level] - 1000) < 100 for level in (1, 2, 3))


@pytest.mark.parametrize("method", ["steps", "learnability"])
def test_a_curriculum_goes_on_from_its_state(method: str, ended: Ended) -> None:
    settings = {"window": 4} if method == "steps" else {}
    source, again = game(method, **settings), game(method, **settings)
    for step in range(1, 6):
        play(source, ended, step, {1: WON, 2: HALF, 3: LOST})
    again.load(json.loads(json.dumps(source.state(), default=dict)))
    for step in range(6, 12):
        assert source.train_tasks(step, range(8)) == again.train_tasks(step, range(8))
        for curriculum in (source, again):
            play(curriculum, ended, step, {1: WON, 2: HALF, 3: LOST})
    assert game(method, seed=1).train_tasks(1, range(8)) != game(method).train_tasks(1, range(8))


def test_held_out_tasks_are_those_of_the_environment_as_it_is_given() -> None:
    tasks = game("steps").eval_tasks(2)
    assert tasks == [Task("TextGame-v0", EVAL_SEED_START + number, kwargs={"level": 3}) for number in range(2)]


def test_results_of_another_level_do_not_move_the_thresholds() -> None:
    curriculum = Thresholds(3, window=2)
    curriculum.observe([[], [1.0, 1.0], [1.0, 1.0]])
    assert curriculum.shares() == [1, 0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"values": (1, 2)}, "method is off"),
        ({"method": "steps"}, "two or more different"),
        ({"method": "steps", "values": (1, 1)}, "two or more different"),
        ({"settings": {"window": 2}}, "method is off"),
        ({"method": "steps", "values": (1, 2), "settings": {"raise_at": 0.2}}, "lower_at < raise_at"),
        ({"method": "steps", "values": (1, 2), "settings": {"window": 0}}, "window"),
        (
            {"method": "steps", "values": (1, 2), "settings": {"window": 2.5}},
            "'window' of curriculum.method steps is int",
        ),
        ({"method": "steps", "values": (1, 2), "settings": {"keep": 0.5}}, "Its settings: raise_at, lower_at, window"),
        ({"method": "learnability", "values": (1, 2), "settings": {"explore": 0.0}}, "explore"),
        ({"method": "learnability", "values": (1, 2), "settings": {"keep": 1.0}}, "keep"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CurriculumConfig(**settings)
