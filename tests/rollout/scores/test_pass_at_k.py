"""pass@k, pass^k and best@k against all subsets of k episodes, and their intervals against simulated evaluations."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.rollout.scores.intervals import share_interval
from agentgym.rollout.scores.pass_at_k import (
    RepeatScores,
    best_at_k,
    difficulty_of,
    pass_at_k,
    pass_hat_k,
    repeat_scores,
)
from agentgym.rollout.scores.statistics import summarize
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import JSON, Message, Task

ROW = Row((TokenSpan((1,), Source.PROMPT), TokenSpan((7,), Source.POLICY, (-0.5,), (0,))))
"""The row of every episode: no score reads it, and thousands of episodes are made."""
SHARES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30)


def episode(
    task: Task,
    member: int,
    reward: float | None,
    *,
    metrics: dict[str, float] | None = None,
    info: dict[str, JSON] | None = None,
) -> Trajectory:
    """An episode of one turn; one without a reward is the environment's failure."""
    failed = reward is None
    return Trajectory(
        task=task,
        group=f"0/{task.seed}",
        member=member,
        rows=(ROW,),
        turns=(Turn(Message("assistant", "hi"), reward),),
        status=Status.ENV_ERROR if failed else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
        metrics=metrics or {},
        error="boom" if failed else None,
        info=info or {},
    )


def played(env: str, seed: int, rewards: Sequence[float | None], **kwargs: JSON) -> list[Trajectory]:
    task = Task(env, seed, kwargs=kwargs)
    return [episode(task, member, reward) for member, reward in enumerate(rewards)]


@pytest.mark.parametrize("num", range(1, 9))
def test_all_subsets_of_k_give_the_same_numbers(num: int) -> None:
    for num_won, k in itertools.product(range(num + 1), range(1, num + 1)):
        outcomes = [1.0] * num_won + [0.0] * (num - num_won)
        subsets = list(itertools.combinations(outcomes, k))
        once = statistics.fmean(max(subset) for subset in subsets)
        always = statistics.fmean(min(subset) for subset in subsets)
        assert pass_at_k(num, num_won, k) == pytest.approx(once, abs=1e-12)
        assert pass_hat_k(num, num_won, k) == pytest.approx(always, abs=1e-12)
        assert best_at_k(outcomes, k) == pytest.approx(once, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.data())
def test_the_best_reward_of_k_is_its_mean_over_all_subsets(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    expected = statistics.fmean(max(subset) for subset in itertools.combinations(rewards, k))
    assert best_at_k(rewards, k) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 2000), st.data())
def test_they_are_shares_and_grow_or_fall_with_k(num: int, data: st.DataObject) -> None:
    num_won, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    once, always = pass_at_k(num, num_won, k), pass_hat_k(num, num_won, k)
    assert 0.0 <= always <= num_won / num + 1e-12
    assert num_won / num - 1e-12 <= once <= 1.0
    assert pass_at_k(num, num_won, 1) == pytest.approx(num_won / num)
    assert pass_hat_k(num, num - num_won, k) == pytest.approx(1.0 - once, abs=1e-9)
    if k < num:
        assert pass_at_k(num, num_won, k + 1) >= once and pass_hat_k(num, num_won, k + 1) <= always


def test_one_success_of_eight_is_the_best_of_all_eight() -> None:
    # drawing with replacement, as verl does, would give 1 - (7 / 8)^8 = 0.656
    assert best_at_k([0.0] * 7 + [1.0], 8) == 1.0 == pass_at_k(8, 1, 8)


def test_estimates_from_n_episodes_are_unbiased_for_fewer() -> None:
    # The mean over what 6 episodes with chance 0.3 can give, weighted by the binomial distribution.
    chances = [math.comb(6, won) * 0.3**won * 0.7 ** (6 - won) for won in range(7)]
    for k in range(1, 7):
        once = sum(chance * pass_at_k(6, won, k) for won, chance in enumerate(chances))
        always = sum(chance * pass_hat_k(6, won, k) for won, chance in enumerate(chances))
        assert (once, always) == pytest.approx((1 - 0.7**k, 0.3**k))


@pytest.mark.parametrize(
    ("num", "num_won", "k", "message"), [(4, 1, 0, "k is between"), (4, 1, 5, "the 4 episodes"), (4, 5, 1, "succeed")]
)
def test_numbers_that_no_task_has_are_refused(num: int, num_won: int, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pass_at_k(num, num_won, k)
    with pytest.raises(ConfigError, match=message):
        pass_hat_k(num, num_won, k)


def test_best_of_more_episodes_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="the 2 episodes"):
        best_at_k([1.0, 0.0], 3)


def test_means_are_over_tasks_with_enough_episodes_and_failed_ones_are_left_out() -> None:
    episodes = [
        *played("Some-v0", 1, [1.0, 0.0, 0.0, 0.0]),
        *played("Some-v0", 2, [1.0, 1.0, None, None]),
        *played("Some-v0", 3, [0.0, None, None, None]),
        *played("Some-v0", 4, [None, None, None, None]),
    ]
    (scores,) = summarize(episodes).at_k
    assert (scores.env, scores.num_tasks, scores.num_episodes, scores.num_failed) == ("Some-v0", 4, 7, 9)
    at_1, at_2, at_4 = scores.at
    assert [(at.k, at.num_tasks, at.num_short) for at in scores.at] == [(1, 3, 1), (2, 2, 2), (4, 1, 3)]
    assert at_1.pass_at_k == at_1.pass_hat_k == at_1.best_at_k == pytest.approx((0.25 + 1 + 0) / 3)
    assert at_2.pass_at_k == pytest.approx((0.5 + 1) / 2) and at_2.pass_hat_k == pytest.approx((0 + 1) / 2)
    assert at_4.pass_at_k == 1.0 and at_4.pass_hat_k == 0.0
    assert at_4.best_at_k_interval is None and at_2.best_at_k_interval is not None


def test_k_doubles_up_to_the_episodes_that_a_task_was_given() -> None:
    (scores,) = repeat_scores(played("Some-v0", 1, [1.0, 0.0, 1.0, 0.0, None, None]))
    assert [at.k for at in scores.at] == [1, 2, 4, 6]
    assert scores.at[-1].pass_at_k is None and scores.at[-1].pass_at_k_interval is None and scores.at[-1].num_short == 1


def test_each_environment_and_each_difficulty_has_its_own_numbers() -> None:
    episodes = [
        *played("Maze-v0", 1, [1.0, 1.0], level=10),
        *played("Maze-v0", 2, [0.0, 0.0], level=2),
        *played("Quiz-v0", 3, [0.0, 1.0]),
    ]
    rows = [(scores.env, scores.difficulty, scores.at[0].pass_at_k) for scores in repeat_scores(episodes)]
    assert rows == [
        (None, None, 0.5),
        ("Maze-v0", None, 0.5),
        ("Maze-v0", "2", 0.0),
        ("Maze-v0", "10", 1.0),
        ("Quiz-v0", None, 0.5),
    ]


def test_one_environment_and_one_difficulty_are_told_once() -> None:
    (scores,) = repeat_scores([*played("Maze-v0", 1, [1.0], level=2), *played("Maze-v0", 2, [0.0], level=2)])
    assert (scores.env, scores.difficulty, scores.num_tasks) == ("Maze-v0", "2", 2)
    assert repeat_scores([]) == ()


def test_the_environments_difficulty_of_a_task_wins_over_its_settings() -> None:
    task = Task("Maze-v0", 1, options={"extra_info": {"level": "hard"}}, kwargs={"level": 3})
    assert difficulty_of(episode(task, 0, 1.0, metrics={"difficulty": 4.5})) == "4.5"
    assert difficulty_of(episode(task, 0, 1.0, info={"difficulty": "easy"})) == "easy"
    assert difficulty_of(episode(task, 0, 1.0)) == "hard"
    assert difficulty_of(episode(Task("Maze-v0", 1, options={"level": 7}, kwargs={"level": 3}), 0, 1.0)) == "7"
    assert difficulty_of(episode(Task("Maze-v0", 1, kwargs={"level": True}), 0, 1.0)) is None


def test_a_failed_episode_has_the_difficulty_of_its_task() -> None:
    first, second = Task("Maze-v0", 1), Task("Maze-v0", 2)
    episodes = [
        episode(first, 0, None),
        episode(first, 1, 1.0, info={"difficulty": "easy"}),
        episode(second, 0, 0.0, info={"difficulty": "hard"}),
    ]
    counts = {scores.difficulty: (scores.num_tasks, scores.num_failed) for scores in repeat_scores(episodes)}
    assert counts == {None: (2, 1), "easy": (1, 1), "hard": (1, 0)}


def test_the_order_of_the_episodes_plays_no_role() -> None:
    episodes = [*played("Some-v0", 1, [1.0, 0.0, None]), *played("Some-v0", 2, [0.0, 0.0, 1.0])]
    report = repeat_scores(episodes)[0].to_json()
    assert repeat_scores(episodes[::-1])[0].to_json() == report
    keys = ("pass_at_k_interval", "num_tasks", "num_short")
    assert isinstance(report["k"], list) and all(key in report["k"][0] for key in keys)


@given(SHARES)
def test_an_interval_of_shares_holds_their_mean_and_stays_between_0_and_1(values: list[float]) -> None:
    interval = share_interval(values)
    assert interval is not None
    assert 0.0 <= interval.low <= statistics.fmean(values) + 1e-12
    assert statistics.fmean(values) - 1e-12 <= interval.high <= 1.0


def test_where_all_tasks_agree_the_bound_is_exact() -> None:
    # With this chance of a success, 20 successes of 20 tasks have a probability of 2.5%.
    all_won, all_lost = share_interval([1.0] * 20), share_interval([0.0] * 20)
    assert all_won is not None and all_lost is not None
    assert all_won.low**20 == pytest.approx(0.025) and all_won.high == 1.0
    assert (1 - all_lost.high) ** 20 == pytest.approx(0.025) and all_lost.low == 0.0
    assert share_interval([]) is None
    with pytest.raises(ConfigError, match="between 0 and 1"):
        share_interval([0.5, 1.5])


def simulated(rng: np.random.Generator, shape: tuple[float, float], num_tasks: int, num: int) -> RepeatScores:
    """An evaluation whose tasks have chances of success from a beta distribution."""
    won = rng.random((num_tasks, num)) < rng.beta(*shape, size=(num_tasks, 1))
    episodes = [
        trajectory for seed, row in enumerate(won) for trajectory in played("Some-v0", seed, row.astype(float).tolist())
    ]
    return repeat_scores(episodes)[0]


@pytest.mark.parametrize(
    ("shape", "num_tasks"), [((1.0, 1.0), 12), pytest.param((2.0, 0.3), 40, marks=pytest.mark.slow), ((0.1, 1.0), 20)]
)
def test_intervals_hold_the_truth_in_at_least_93_of_100_evaluations(shape: tuple[float, float], num_tasks: int) -> None:
    rng = np.random.default_rng(5)
    runs = [simulated(rng, shape, num_tasks, 4) for _ in range(300)]
    first, second = shape
    for index, k in enumerate((1, 2, 4)):
        # E[p^k] and E[(1 - p)^k] of a beta distribution, in closed form
        always = math.prod((first + i) / (first + second + i) for i in range(k))
        never = math.prod((second + i) / (first + second + i) for i in range(k))
        for truth, kind in ((1 - never, "pass_at_k"), (always, "pass_hat_k")):
            intervals = [getattr(run.at[index], f"{kind}_interval") for run in runs]
            assert statistics.fmean(interval.low <= truth <= interval.high for interval in intervals) >= 0.93
            # nor are they that often right by being wide: what the estimates themselves scatter is the measure
            scatter = statistics.stdev(getattr(run.at[index], kind) for run in runs)
            assert statistics.fmean(interval.high - interval.low for interval in intervals) < 2 * 2 * 1.96 * scatter
