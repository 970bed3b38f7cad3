"""A run plays its held-out tasks when training succeeds often enough, and ends if they succeed too."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from agentgym.cli.main import main
from agentgym.errors import ConfigError
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.monitoring.target import is_target_near
from agentgym.trainers.settings.held_out import HeldOutConfig
from tests.trainers.monitoring.test_halt import Priceless

Train = Callable[..., Any]


class Harder(Priceless):
    """Succeeds, except for the seeds that `fails` names."""

    fails: ClassVar[frozenset[int]] = frozenset()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.paid = float(seed not in self.fails)
        return super().reset(seed=seed, options=options)


@pytest.fixture
def solvable(small_run: TrainConfig) -> TrainConfig:
    """A run whose episodes succeed, and end at their first step."""
    return replace(small_run, env=f"{__name__}:Harder", steps=8, tasks=2, eval=HeldOutConfig(episodes=4))


def evaluations(folder: Path) -> list[tuple[str, int]]:
    records = [(record.phase, record.step) for record in read_episodes(folder) if record.phase != "train"]
    assert all(records.count(record) == 4 for record in records)
    return list(dict.fromkeys(records))


@pytest.mark.parametrize(
    ("successes", "played_after"),
    [
        ([0.9] * 9, []),
        ([1.0], []),
        ([0.5, 0.9, 1.0, 0.94, 0.1], [3]),
        ([1.0] * 13, [2, 7, 12]),
        ([1.0, 1.0, *[0.0] * 7, 1.0, 1.0, 1.0], [2, 11]),
    ],
)
def test_held_out_tasks_are_played_after_two_steps_at_the_target_and_every_fifth(
    successes: list[float], played_after: list[int]
) -> None:
    assert [n for n in range(len(successes) + 1) if is_target_near(successes[:n], 0.95)] == played_after


@pytest.mark.parametrize(
    ("rate_at", "least", "most"),
    [
        (lambda step: 0.97 - 0.57 * math.exp(-step / 8), 0.004, 0.012),
        (lambda step: 0.96, 0.003, 0.012),
        (lambda step: 0.93, 0.02, 0.03),
    ],
    ids=["rises", "stays", "stays below"],
)
def test_the_success_that_ends_a_run_is_as_optimistic_as_the_documentation_states(
    rate_at: Callable[[int], float], least: float, most: float
) -> None:
    rng = np.random.default_rng(1)
    excess: list[float] = []
    for _ in range(300):
        successes: list[float] = []
        for step in range(1, 41):
            successes.append(rng.binomial(128, rate_at(step)) / 128)
            if is_target_near(successes, 0.95) and (held_out := rng.binomial(200, rate_at(step)) / 200) >= 0.95:
                excess.append(held_out - rate_at(step))
                break
    assert len(excess) > 50 and least < sum(excess) / len(excess) < most


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_ends_at_its_target_and_its_evaluation_is_the_one_after_training(
    solvable: TrainConfig, train: Train, tmp_path: Path, max_staleness: int
) -> None:
    result, _ = train(replace(solvable, max_staleness=max_staleness), tmp_path / "run")
    assert (result.end, result.steps, result.after.success, result.after.step) == ("target_success", 2, 1.0, 2)
    assert evaluations(tmp_path / "run") == [("eval_before", 0), ("eval_after", 2)]
    again, _ = train(
        solvable if not max_staleness else replace(solvable, max_staleness=2), tmp_path / "run", resume=True
    )
    assert (again.end, again.steps) == ("target_success", 2)
    assert evaluations(tmp_path / "run") == [("eval_before", 0), ("eval_after", 2)]


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"target_success": None}, {"eval": HeldOutConfig(episodes=0)}])
def test_a_run_without_a_target_or_without_held_out_tasks_takes_all_steps(
    solvable: TrainConfig, train: Train, tmp_path: Path, settings: dict[str, Any]
) -> None:
    result, _ = train(replace(solvable, steps=3, **settings), tmp_path / "run")
    assert (result.end, result.steps) == ("steps", 3)


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_continues_below_the_held_out_target_and_resumes_bitwise(
    solvable: TrainConfig, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    train(replace(solvable, steps=1), tmp_path / "first")
    held_out = [record.trajectory.task.seed for record in read_episodes(tmp_path / "first") if record.step == 0]
    monkeypatch.setattr(Harder, "fails", frozenset(held_out[:2]))
    run, config = tmp_path / "run", replace(solvable, max_staleness=max_staleness)
    result, _ = train(config, run)
    assert (result.end, result.steps, result.after.success) == ("steps", 8, 0.5)
    assert evaluations(run) == [("eval_before", 0), ("eval_during", 2), ("eval_during", 7), ("eval_after", 8)]
    assert main(["verify", str(run)]) == 0
    whole = (run / "episodes.jsonl.zst").read_bytes()
    for folder in (run / "checkpoints").glob("step-*"):
        if folder.name != "step-000002":
            shutil.rmtree(folder)
    resumed, _ = train(config, run, resume=True)
    assert (resumed.end, resumed.steps, resumed.after) == ("steps", 8, result.after)
    if not max_staleness:
        assert (run / "episodes.jsonl.zst").read_bytes() == whole
    assert evaluations(run) == [("eval_before", 0), ("eval_during", 2), ("eval_during", 7), ("eval_after", 8)]


@pytest.mark.parametrize("target", [0.0, -1.0, 1.5])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="target_success is a share above 0 and at most 1"):
        TrainConfig(env="TextGame-v0", target_success=target)


@pytest.mark.long
def test_the_command_prints_why_it_ended_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"train --env {__name__}:Harder --env-kwargs level=1 --tasks 2 --group-size 4 --eval.episodes 4"
    assert main([*command.split(), "--output", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert "held-out play during training: 4 episodes" in output
    assert "2 steps in" in output
    assert "ended before step 40: held-out success reached target_success 0.95 (None trains on)" in output
