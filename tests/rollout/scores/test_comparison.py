"""Evaluations of the same tasks are compared task by task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentgym.cli.main import main
from agentgym.rollout.scores.comparison import paired_difference
from agentgym.rollout.scores.intervals import mean_interval


def test_a_difference_is_the_mean_over_shared_tasks_of_mean_episode_scores() -> None:
    first = {"a": [(1.0, 2.0), (0.0, 0.0)], "b": [(0.0, 0.0)], "c": [(1.0, 1.0)]}
    second = {"a": [(1.0, 3.0)], "b": [(1.0, 1.0)], "d": [(0.0, 0.0)]}
    difference = paired_difference(first, second)
    assert difference is not None
    assert (difference.num_tasks, difference.success, difference.reward) == (2, 0.75, 1.5)
    back = paired_difference(second, first)
    assert back is not None and (back.success, back.reward) == (-0.75, -1.5)
    assert paired_difference(first, {"e": [(0.0, 0.0)]}) is None


def test_the_interval_of_a_difference_covers_the_true_one_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    covered, widths, unpaired = 0, [], []
    for _ in range(400):
        ease = rng.beta(0.5, 0.5, 100)
        better = np.clip(ease + 0.1, 0, 1)
        draws = [{f"{n}": [(float(rng.random() < p), 0.0)] for n, p in enumerate(chance)} for chance in (ease, better)]
        difference = paired_difference(*draws)
        assert difference is not None and difference.success_interval is not None
        true = float((better - ease).mean())
        covered += difference.success_interval.low <= true <= difference.success_interval.high
        widths.append(difference.success_interval.high - difference.success_interval.low)
        own = [mean_interval([task[0][0] for task in draw.values()], list(draw)) for draw in draws]
        unpaired.append(sum((part.high - part.low) ** 2 for part in own if part) ** 0.5)
    assert 0.92 <= covered / 400 <= 0.98
    assert np.mean(widths) < 0.8 * np.mean(unpaired)


def test_the_command_compares_evaluations_and_training_runs(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy in ("oracle", "random"):
        words = ["eval", "--env", "TextGame-v0", "--policy", policy, "-n", "5", "--output", str(tmp_path / policy)]
        assert main(words) == 0
    capsys.readouterr()
    runs = [str(tmp_path / "random"), str(tmp_path / "oracle"), str(finished_run)]
    assert main(["compare", *runs, "--json"]) == 0
    output, errors = capsys.readouterr()
    random, oracle, trained = json.loads(output)["runs"]
    assert (random["success"], oracle["success"], oracle["over_first"]["success"]) == (0.0, 1.0, 1.0)
    assert oracle["over_first"]["num_tasks"] == 5
    assert trained["num_tasks"] == 8 and trained["over_first"] is None  # its level is another one
    assert "no task in common with the first" in errors
    assert oracle["over_first"]["success_interval"][0] < 1.0 == oracle["over_first"]["success_interval"][1]
    assert main(["compare", runs[0]]) == 2
    assert "two or more runs are compared" in capsys.readouterr().err
    assert main(["compare", runs[0], str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


RATES = [(0.5, 0.5, 0.5), (0.9, 0.95, 0.8), (0.97, 0.99, 0.9), (0.5, 0.6, 0.0), (0.05, 0.95, 0.0)]


@pytest.mark.parametrize("num_tasks", [20, 50])
@pytest.mark.parametrize(("first", "second", "shared"), RATES)
def test_the_interval_of_a_difference_holds_the_true_one_near_0_and_1(
    first: float, second: float, shared: float, num_tasks: int
) -> None:
    rng = np.random.default_rng(num_tasks)
    covered = {"success": 0, "reward": 0}
    for _ in range(400):
        ease, own_ease = rng.random(num_tasks), rng.random(num_tasks)
        solved = (ease < first, np.where(rng.random(num_tasks) < shared, ease, own_ease) < second)
        scores = [{f"{task}": [(float(won), float(won))] for task, won in enumerate(bits)} for bits in solved]
        difference = paired_difference(*scores)
        assert difference is not None
        for name in covered:
            interval = getattr(difference, f"{name}_interval")
            assert interval.low < interval.high
            covered[name] += interval.low <= second - first + 1e-9 and second - first - 1e-9 <= interval.high
    assert min(covered.values()) >= 0.92 * 400


def test_a_difference_of_no_task_has_exact_bounds() -> None:
    scores = {f"{task}": [(1.0, 1.0)] for task in range(20)}
    difference = paired_difference(scores, scores)
    assert difference is not None and difference.success_interval is not None
    reach = 1 - 0.025 ** (1 / 20)  # the most that can differ, where 20 without a difference have a chance of 0.025
    assert difference.success_interval.ends == pytest.approx([-reach, reach]) and difference.reward_interval is not None
    assert difference.reward_interval == difference.success_interval


def test_a_difference_that_is_equal_in_every_task_has_no_interval() -> None:
    first = {f"{task}": [(1.0, 0.1 * task)] for task in range(5)}
    second = {f"{task}": [(1.0, 0.1 * task + 0.3)] for task in range(5)}
    difference = paired_difference(first, second)
    assert difference is not None and difference.reward == pytest.approx(0.3) and difference.reward_interval is None
    assert difference.to_json()["reward_interval"] is None and difference.success_interval is not None


def test_an_interval_of_rewards_stays_within_the_possible_ones() -> None:
    values, names = [0.9, 1.0, 0.6, 0.0], ["a", "b", "c", "d"]
    wide, cut = mean_interval(values, names), mean_interval(values, names, (0.0, 1.0))
    assert wide is not None and cut is not None
    assert wide.high > 1.0 and cut.ends == [0.0, 1.0]
    assert mean_interval([2.0, 0.0, 1.0], names[:3], (0.0, 1.0)) == mean_interval([2.0, 0.0, 1.0], names[:3])
