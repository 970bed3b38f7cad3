"""Evaluations on held-out tasks during training: when they are played, where their numbers go, and what they decide."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentgym.cli.main import main
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.record.episodes_file import EpisodeRecord, read_episodes
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.checkpoints.run_folder import read_settings
from agentgym.trainers.checkpoints.writer import best_step
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.observer import Unobserved
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.monitoring.target import has_stalled
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.held_out import HeldOutConfig

Train = Callable[..., Any]


@pytest.fixture
def watched(small_run: TrainConfig) -> TrainConfig:
    """A run of five steps whose held-out tasks are played after every second one."""
    settings = HeldOutConfig(episodes=3, every=2)
    return replace(small_run, steps=5, tasks=2, group_size=2, eval=settings, target_success=None)


def held_out(folder: Path) -> list[EpisodeRecord]:
    return [record for record in read_episodes(folder) if record.phase != "train"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_every_second_step_is_evaluated_and_a_resumed_run_has_equal_bytes(
    watched: TrainConfig, train: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(watched, run)
    phases = list(dict.fromkeys((record.phase, record.step) for record in held_out(run)))
    assert phases == [("eval_before", 0), ("eval_during", 2), ("eval_during", 4), ("eval_after", 5)]
    for line in lines(run):
        own = [record.trajectory for record in held_out(run) if record.step == line["step"] - 1]
        if own and line["step"] != 6:
            assert line["eval_success"] == sum(bool(played.success) for played in own) / 3
            assert line["eval_reward_mean"] == pytest.approx(sum(played.reward or 0 for played in own) / 3)
        assert ("eval_success" in line) == (line["step"] in (1, 3, 5))
    assert verify_run(run).ok
    whole = [(run / name).read_bytes() for name in ("episodes.jsonl.zst",)]
    for folder in (run / "checkpoints").glob("step-*"):
        if folder.name != "step-000002":
            shutil.rmtree(folder)
    train(watched, run, resume=True)
    assert [(run / name).read_bytes() for name in ("episodes.jsonl.zst",)] == whole


@pytest.mark.long
def test_a_number_that_its_episodes_do_not_give_is_found(watched: TrainConfig, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(replace(watched, steps=3), run)
    path = run / "metrics.jsonl"
    success = lines(run)[2]["eval_success"]
    path.write_text(path.read_text().replace(f'"eval_success":{success}', f'"eval_success":{success + 0.25}'))
    report = verify_run(run)
    assert not report.ok
    assert "eval_success of step" in "\n".join(report.lines())


@pytest.mark.parametrize(
    ("scores", "patience", "stalled"),
    [
        ([0.1], 1, False),
        ([0.1, 0.1], 1, True),
        ([0.1, 0.2, 0.1], 2, False),
        ([0.1, 0.3, 0.2, 0.3], 2, True),
        ([0.1, 0.3, 0.2, 0.31], 2, False),
    ],
)
def test_a_run_has_stalled_once_no_late_evaluation_is_better(scores: list[float], patience: int, stalled: bool) -> None:
    assert has_stalled([(score, 0.0) for score in scores], patience) is stalled
    assert has_stalled([(0.0, score) for score in scores], patience) is stalled


@pytest.mark.long
def test_patience_ends_a_run_with_a_message(
    watched: TrainConfig, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train --env tests.trainers.monitoring.test_target:Harder --env-kwargs level=1 --tasks 2 --group-size 2"
    options = "--eval.episodes 2 --eval.every 1 --eval.patience 2 --target-success None"
    run = tmp_path / "run"
    assert main([*words.split(), *options.split(), "--output", str(run), "--json"]) == 0
    out, errors = capsys.readouterr()
    assert "ended before step 40: 2 evaluations in a row were not better (eval.patience)" in errors
    assert json.loads(out)["end"] == "patience"
    assert json.loads(out)["steps"] == 2
    assert [record.phase for record in held_out(run)] == [
        *["eval_before"] * 2,
        *["eval_during"] * 2,
        *["eval_after"] * 2,
    ]
    assert main(["verify", str(run)]) == 0


class Beside(Unobserved):
    """Notes for each phase whether a step learns when it begins."""

    def __init__(self) -> None:
        self.seen: dict[str, list[bool]] = {}

    def on_phase(self, name: str, episodes: int) -> None:
        running = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
        self.seen.setdefault(name, []).append("learn_step" in running)


@pytest.mark.long
def test_an_engine_with_weights_of_its_own_evaluates_while_a_step_learns(watched: TrainConfig, tmp_path: Path) -> None:
    run, watcher = tmp_path / "run", Beside()
    checkpoint = CheckpointConfig(every=100, keep=1, keep_best="eval_reward_mean")
    Trainer(replace(watched, max_staleness=1, checkpoint=checkpoint), run, watcher).fit()
    assert watcher.seen["eval_during"] == [True, True]
    phases = dict.fromkeys((record.phase, record.step) for record in read_episodes(run))
    order = [("eval_during", 2), ("train", 3), ("train", 4), ("eval_during", 4), ("train", 5), ("eval_after", 5)]
    assert list(phases) == [("eval_before", 0), ("train", 1), ("train", 2), *order]
    for record in held_out(run):
        versions = {version for row in record.trajectory.rows for version in row.policy_versions.tolist()}
        assert versions == {-1, record.step}
    assert [line["step"] for line in lines(run) if "eval_success" in line] == [1, 3, 5]
    assert (run / "checkpoints" / "best").exists()
    assert main(["verify", str(run), "--deep"]) == 0


@pytest.mark.long
def test_patience_counts_evaluations_that_were_played_while_a_step_learned(
    watched: TrainConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = HeldOutConfig(episodes=2, every=1, patience=1)
    config = replace(watched, env="tests.trainers.monitoring.test_target:Harder", env_kwargs={"level": 1})
    result = Trainer(replace(config, max_staleness=1, eval=settings), run).fit()
    assert (result.end, result.steps) == ("patience", 2)  # of two evaluations the second found nothing better
    assert [(r.phase, r.step) for r in held_out(run)][::2] == [
        ("eval_before", 0),
        ("eval_during", 1),
        ("eval_after", 2),
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"max_staleness": 1}, True),
        ({"engine": "vllm"}, True),
        ({"engine": "vllm", "server": {"serving": {"sleep": True}}}, False),
        ({"executor": "ray"}, True),
        ({"executor": "ray", "ray": {"layout": "colocated"}}, False),
    ],
)
def test_who_shares_the_processor_with_the_learner_evaluates_between_steps(
    settings: dict[str, Any], expected: bool
) -> None:
    assert config_from_mapping(TrainConfig, {"env": "TextGame-v0", **settings}).evaluates_while_learning is expected


@pytest.mark.long
def test_the_best_checkpoint_is_that_of_the_best_evaluation(watched: TrainConfig, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = CheckpointConfig(every=100, keep=1, keep_best="eval_reward_mean")
    result, _ = train(replace(watched, checkpoint=checkpoint), run)
    scores = {line["step"] - 1: line["eval_reward_mean"] for line in lines(run) if line["step"] in (3, 5)}
    scores[5] = result.after.reward_mean
    best = max(scores, key=lambda step: (scores[step], step))
    assert (run / "checkpoints" / "best").read_text() == f"step-{best:06d}\n"
    checkpoints = {folder.name for folder in (run / "checkpoints").glob("step-*")}
    assert checkpoints == {f"step-{best:06d}", "step-000005"}


def test_the_number_of_an_evaluation_is_that_of_the_step_before_its_line() -> None:
    evaluations = [{"step": 1, "eval_success": 0.9}, {"step": 3, "eval_success": 0.2}, {"step": 5, "eval_success": 0.1}]
    assert best_step([2, 3, 4], evaluations, "eval_success", 10) == 2
    assert best_step([3], evaluations, "eval_success", 10) is None


@pytest.mark.long
def test_repeated_greedy_tasks_give_pass_at_k_and_one_reply(watched: TrainConfig, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = HeldOutConfig(episodes=2, every=1, repeats=2, temperature=0.0)
    result, _ = train(replace(watched, steps=1, eval=settings), run)
    (line,) = lines(run)
    assert line["eval_pass_at_2"] == line["eval_success"]
    assert [at.k for at in result.after.at_k] == [2]
    first, second = [record.trajectory for record in held_out(run)][:2]
    assert (first.member, second.member) == (0, 1)
    assert [row.ids.tolist() for row in first.rows] == [row.ids.tolist() for row in second.rows]
    assert main(["verify", str(run), "--deep"]) == 0


@pytest.mark.long
def test_held_out_tasks_may_be_those_of_other_environments(watched: TrainConfig, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mix = {"TextGame-v0": {"kwargs": {"level": 2}}, "GuessNumber-v0": 2}
    result, _ = train(replace(watched, steps=1, eval=HeldOutConfig(episodes=3, every=1, mix=mix)), run)
    assert {name: part.episodes for name, part in result.after.by_env.items()} == {
        "TextGame-v0": 1,
        "GuessNumber-v0": 2,
    }
    (line,) = lines(run)
    assert {"eval_success/TextGame-v0", "eval_success/GuessNumber-v0", "eval_success"} <= line.keys()
    assert {record.trajectory.task.env_id for record in held_out(run)} == set(mix)


@pytest.mark.long
def test_a_run_of_an_earlier_version_is_resumed_with_its_held_out_tasks(
    watched: TrainConfig, train: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(replace(watched, steps=1, eval=HeldOutConfig(episodes=3)), run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["eval_episodes"] = settings.pop("eval")["episodes"]
    settings["local"]["compile"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert config_from_mapping(TrainConfig, read_settings(run)).eval == HeldOutConfig(episodes=3)
    assert Trainer.load(run, steps=2).fit().steps == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": -1}, "eval.every must be at least 0"),
        ({"repeats": 0}, "eval.repeats must be at least 1"),
        ({"every": 2, "episodes": 0}, "eval.every 2 plays held-out tasks, and eval.episodes is 0"),
        ({"patience": 3}, "eval.patience counts evaluations during training: add eval.every"),
        ({"temperature": -0.5}, "eval.temperature must be at least 0"),
        ({"mix": {"TextGame-v0": 0}}, "mix: the weight of 'TextGame-v0' is a number above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HeldOutConfig(**settings)


@pytest.mark.long
def test_what_the_command_line_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", "--env", "TextGame-v0", "--output", str(tmp_path / "run")]
    assert main([*words, "--eval-episodes", "3"]) == 2
    assert "eval.episodes" in capsys.readouterr().err
    assert main([*words, "--checkpoint.keep-best", "eval_success"]) == 2
    assert "add eval.every" in capsys.readouterr().err
    assert main([*words, "--eval.mix", "TextGam-v0=1"]) == 2
    assert "TextGame-v0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
