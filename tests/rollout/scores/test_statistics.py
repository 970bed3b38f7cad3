"""Summaries and their intervals, against numbers worked out by hand and known values."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.cli.eval import summary_rows
from agentgym.rollout.scores.intervals import mean_interval, share_interval, success_interval
from agentgym.rollout.scores.statistics import summarize
from agentgym.trajectory import MAX_REWARD, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

BITS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30)


def own_clusters(values: list[float]) -> list[str]:
    return [str(index) for index in range(len(values))]


def episode(seed: int, member: int, reward: float | None, *, malformed: int = 0) -> Trajectory:
    reply = TokenSpan((7, 2), Source.POLICY, (-0.5, -0.5), (0, 0))
    failed = reward is None
    return Trajectory(
        task=Task("Some-v0", seed),
        group=f"0/{seed}",
        member=member,
        rows=(Row((TokenSpan((1,), Source.PROMPT), reply)),),
        turns=(Turn(Message("assistant", "hi"), reward),),
        status=Status.ENV_ERROR if failed else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
        metrics={"malformed_calls": malformed},
        error="boom" if failed else None,
    )


# Wilson's score interval as published for these counts (8 of 10: Brown, Cai and DasGupta's formula by hand)
@pytest.mark.parametrize(
    ("num_won", "num", "low", "high"), [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (50, 50, 0.9287, 1.0)]
)
def test_success_has_wilsons_interval(num_won: int, num: int, low: float, high: float) -> None:
    values = [1.0] * num_won + [0.0] * (num - num_won)
    interval = success_interval(values, own_clusters(values))
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)


def test_two_tasks_that_repeat_exactly_are_worth_one_episode() -> None:
    # residual sums +1 and -1: variance 2/1 * 2 / 16 = 1/4, so p (1 - p) / variance = 1 effective episode
    interval = success_interval([1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"])
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((0.0546, 0.9454), abs=1e-4)


def test_repeats_of_won_tasks_are_no_new_evidence() -> None:
    assert success_interval([1.0] * 40, [str(i // 4) for i in range(40)]) == success_interval(
        [1.0] * 10, own_clusters([1.0] * 10)
    )


@pytest.mark.parametrize(  # Student's t with 1, 2, 3 and 7 degrees of freedom, from a table
    ("values", "quantile"),
    [
        ([1.0, 2.0], 12.7062),
        ([1.0, 2.0, 4.0], 4.30265),
        ([1.0, 2.0, 4.0, 0.5], 3.18245),
        ([1.0, 2.0, 4.0, 0.5, 3.0, 3.0, 2.5, 7.0], 2.36462),
    ],
)
def test_the_reward_interval_of_single_episodes_is_the_textbook_one(values: list[float], quantile: float) -> None:
    interval = mean_interval(values, own_clusters(values))
    assert interval is not None
    half = quantile * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.fmean(values)
    assert (interval.low, interval.high) == pytest.approx((mean - half, mean + half), abs=2e-3 * half)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.97])
@pytest.mark.parametrize("low", [0.0, -1.0])
def test_the_interval_of_rewards_of_two_values_holds_the_true_mean(rate: float, low: float) -> None:
    rng, covered = np.random.default_rng(3), 0
    for _ in range(400):
        values = np.where(rng.random(20) < rate, 1.0, low).tolist()
        interval = mean_interval(values, own_clusters(values), (low, 1.0))
        assert interval is not None and low <= interval.low < interval.high <= 1.0
        covered += interval.low <= rate + (1 - rate) * low <= interval.high
    assert covered >= 0.92 * 400


def test_the_interval_of_a_normal_reward_holds_the_true_mean_of_few_tasks() -> None:
    rng = np.random.default_rng(4)
    intervals = [mean_interval(rng.normal(size=5).tolist(), own_clusters([0.0] * 5)) for _ in range(600)]
    assert 0.92 <= np.mean([interval is not None and interval.low <= 0 <= interval.high for interval in intervals])


def test_repeats_of_tasks_count_as_their_share() -> None:
    shares = [0.25, 1.0, 0.0, 0.75, 1.0]
    episodes = [float(place < 4 * share) for share in shares for place in range(4)]
    names = [str(place // 4) for place in range(20)]
    interval, expected = mean_interval(episodes, names), share_interval(shares)
    assert interval is not None and expected is not None and interval.ends == pytest.approx(expected.ends)


@pytest.mark.parametrize(
    ("values", "has"), [([0.3] * 7, False), ([2.0] * 2, False), ([0.0] * 3, True), ([1.0] * 3, True)]
)
def test_a_reward_that_is_always_the_same_has_an_interval_only_if_it_is_0_or_1(values: list[float], has: bool) -> None:
    summary = summarize([episode(seed, 0, value) for seed, value in enumerate(values)])
    assert (summary.reward_interval is not None) is has
    row = next(row for row in summary_rows(summary) if row[0] == "reward")
    assert row[2] == (f"{summary.reward_interval} (95%)" if has else "in every task")
    assert (summary.at_k[0].at[0].best_at_k_interval is not None) is has


def test_a_single_task_has_no_interval() -> None:
    assert mean_interval([1.0, 0.0, 1.0], ["a", "a", "a"]) is None
    assert success_interval([], []) is None


@given(BITS)
def test_an_interval_holds_its_rate_and_stays_in_the_unit_range(values: list[float]) -> None:
    interval = success_interval(values, own_clusters(values))
    assert interval is not None
    assert 0.0 <= interval.low <= sum(values) / len(values) + 1e-12
    assert sum(values) / len(values) - 1e-12 <= interval.high <= 1.0


@given(BITS, st.integers(2, 4))
def test_copies_of_episodes_never_narrow_an_interval(values: list[float], num_copies: int) -> None:
    clusters = own_clusters(values)
    once = success_interval(values, clusters)
    copied = success_interval(values * num_copies, clusters * num_copies)
    assert once is not None and copied is not None
    assert copied.high - copied.low >= (once.high - once.low) * 0.999


def test_failed_episodes_are_counted_and_in_no_mean() -> None:
    played = [episode(1, 0, 1.0), episode(1, 1, 0.0, malformed=2), episode(2, 0, None, malformed=1)]
    summary = summarize(played)
    assert summary.success == 0.5 and summary.mean_reward == 0.5
    assert summary.num_episodes == 2 and summary.num_tasks == 2
    assert summary.failed == {"env_error": 1} and summary.num_failed == 1
    assert summary.stop_reasons == {"terminated": 2}
    assert summary.mean_turns == 1.0 and summary.mean_tokens == 2.0 and summary.malformed_calls == 3


def test_an_evaluation_that_failed_whole_has_no_means() -> None:
    summary = summarize([episode(1, 0, None)])
    assert summary.success is None and summary.mean_reward is None and summary.success_interval is None
    assert summary.to_json()["num_failed"] == 1


def test_the_largest_rewards_have_a_mean_and_an_interval() -> None:
    summary = summarize([episode(seed, member, MAX_REWARD * (-1) ** seed) for seed in range(4) for member in range(2)])
    assert summary.mean_reward == 0.0
    assert summary.reward_interval is not None and math.isfinite(summary.reward_interval.high)
    assert "Infinity" not in json.dumps(summary.to_json()) and "NaN" not in json.dumps(summary.to_json())
