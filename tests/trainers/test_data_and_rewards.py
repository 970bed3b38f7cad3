"""A run on rows of files and rewards of one's own: what is trained, evaluated, resumed and refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.data import DataConfig
from agentgym.envs.games.text_game.env import TextGame
from agentgym.errors import ConfigError, TrainingHalted, UnknownName
from agentgym.evaluation import evaluate
from agentgym.evaluation.play.config import EvalConfig
from agentgym.rewards import Reward, RewardConfig
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.config import AdvantageConfig, TrainConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trajectory import Trajectory
from agentgym.types import Task

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "verl_20.parquet"
HERE = "tests.trainers.test_data_and_rewards"
Train = Callable[..., Any]


def by_length(trajectory: Trajectory, task: Task) -> Reward:
    """Short replies are better; a component for gdpo."""
    tokens = float(trajectory.num_trained_tokens)
    return Reward(
        -tokens / 100, components={"short": -tokens / 100, "turns": float(len(trajectory.turns))}, success=True
    )


def ranks(trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> list[float]:
    """The rank of each by length among all of the batch."""
    order = sorted(range(len(trajectories)), key=lambda index: trajectories[index].num_trained_tokens)
    return [order.index(index) / len(order) for index in range(len(order))]


def broken_at_times(trajectory: Trajectory, task: Task) -> float:
    if trajectory.member == 0:
        raise RuntimeError("the scorer's disk is full")
    return float(trajectory.member)


def always_broken(trajectory: Trajectory, task: Task) -> float:
    raise RuntimeError("the scorer's disk is full")


@pytest.fixture
def small_run(small_run: TrainConfig) -> TrainConfig:
    """A smaller run: the tasks and rewards of few episodes show as much."""
    return replace(small_run, tasks=2, group_size=3)


@pytest.fixture
def on_rows(small_run: TrainConfig) -> TrainConfig:
    """The small run on the rows of a parquet file in verl's form."""
    return replace(
        small_run,
        env="Prompt-v0",
        env_kwargs={},
        data=DataConfig(train=str(GSM8K), eval_fraction=0.3),
        limits=Limits(max_turns=1, turn_tokens=12),
        eval=HeldOutConfig(episodes=4),
    )


def phase(folder: Path, name: str) -> list[Trajectory]:
    return [record.trajectory for record in read_episodes(folder) if record.phase == name]


@pytest.mark.long
def test_a_parquet_file_of_verl_trains_and_evaluates_as_it_is(
    on_rows: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(on_rows, reward=RewardConfig(function="gsm8k"))
    result, _ = train(config, tmp_path / "run")
    trained, held_out = phase(tmp_path / "run", "train"), phase(tmp_path / "run", "eval_after")
    assert len(trained) == 12 and len(held_out) == 4 and result.after.failed == 0
    assert all(episode.task.options["data_source"] == "openai/gsm8k" for episode in trained)
    assert not {episode.task.key for episode in trained} & {episode.task.key for episode in held_out}
    done = evaluate(
        EvalConfig(policy=str(result.checkpoint), data=config.data, reward=config.reward, num_tasks=4, turn_tokens=12),
        output=tmp_path / "eval",
    )
    assert [episode.task.key for episode in done.trajectories] == [episode.task.key for episode in held_out]
    assert done.config.env == "Prompt-v0"


def test_the_oracle_of_rows_is_right_by_the_scorer_too(tmp_path: Path) -> None:
    config = EvalConfig(policy="oracle", data=DataConfig(eval=str(GSM8K)), reward=RewardConfig(function="exact_match"))
    done = evaluate(replace(config, num_tasks=20), output=tmp_path / "eval")
    assert done.summary.success == 1.0 and done.summary.num_episodes == 20


@pytest.mark.slow
def test_a_run_on_rows_that_is_resumed_equals_one_that_was_never_stopped(
    on_rows: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(on_rows, eval=HeldOutConfig(episodes=0), reward=RewardConfig(function=f"{HERE}:by_length"))
    train(replace(config, steps=2), tmp_path / "whole")
    train(replace(config, steps=1), tmp_path / "parts")
    train(replace(config, steps=2), tmp_path / "parts", resume=True)
    files = [(tmp_path / name / "episodes.jsonl.zst").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


@pytest.mark.long
def test_a_reward_function_takes_the_place_of_the_environments(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    train(replace(small_run, steps=1, reward=RewardConfig(function=f"{HERE}:by_length")), tmp_path / "run")
    for episode in phase(tmp_path / "run", "train"):
        assert episode.reward == pytest.approx(-episode.num_trained_tokens / 100)


@pytest.mark.long
def test_components_of_a_reward_feed_the_advantage_that_weighs_them(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(small_run, algo="gdpo", steps=1, reward=RewardConfig(function=f"{HERE}:by_length"))
    _, watcher = train(config, tmp_path / "run")
    assert watcher.steps[0].update is not None and watcher.steps[0].update.grad_norm > 0


@pytest.mark.long
def test_a_batch_function_sees_all_episodes_of_a_step(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    reward = RewardConfig(function=f"{HERE}:ranks", manner="batch")
    train(replace(small_run, steps=1, eval=HeldOutConfig(episodes=3), reward=reward), tmp_path / "run")
    rewards = sorted(episode.reward or 0.0 for episode in phase(tmp_path / "run", "train"))
    assert rewards == pytest.approx([index / 6 for index in range(6)])
    assert sorted(episode.reward or 0.0 for episode in phase(tmp_path / "run", "eval_before")) == pytest.approx(
        [0, 1 / 3, 2 / 3]
    )


@pytest.mark.long
def test_an_episode_whose_reward_fails_is_no_zero_and_too_many_end_the_run(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(small_run, steps=1, reward=RewardConfig(function=f"{HERE}:broken_at_times"))
    _, watcher = train(config, tmp_path / "run")
    failed = [episode for episode in phase(tmp_path / "run", "train") if episode.member == 0]
    assert len(failed) == 2 and all(episode.status == "env_error" and episode.reward is None for episode in failed)
    assert all("the scorer's disk is full" in (episode.error or "") for episode in failed)
    assert watcher.steps[0].rollout.failed == 2 and watcher.steps[0].rollout.reward_mean == 1.5
    with pytest.raises(TrainingHalted, match="the scorer's disk is full"):
        train(replace(config, reward=RewardConfig(function=f"{HERE}:always_broken")), tmp_path / "other")


@pytest.mark.slow
def test_classes_and_functions_may_replace_names(small_run: TrainConfig, tmp_path: Path) -> None:
    trainer = Trainer(
        replace(small_run, steps=1),
        tmp_path / "run",
        env=TextGame,
        reward=lambda trajectory, task: len(trajectory.turns),
    )
    result = trainer.fit()
    assert trainer.config.env == "agentgym.envs.games.text_game.env:TextGame" and result.steps == 1
    assert all(episode.reward == len(episode.turns) for episode in phase(tmp_path / "run", "train"))
    with pytest.raises(UnknownName, match="<lambda>"):  # never goes on with another reward without a word
        Trainer.load(tmp_path / "run", steps=2).fit()
    assert Trainer.load(tmp_path / "run", steps=2, reward=trainer.reward).fit().steps == 2
    (line, _) = trainer.metrics
    recorded = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["step"] == 1 and {**line, "chain": recorded["chain"]} == recorded


def test_a_reward_in_python_may_be_a_name_and_what_is_no_configuration_is_refused(
    small_run: TrainConfig, tmp_path: Path
) -> None:
    trainer = Trainer(small_run, tmp_path / "run", reward=f"{HERE}:by_length")
    assert trainer.reward is None and trainer.config.reward == RewardConfig(function=f"{HERE}:by_length")
    with pytest.raises(ConfigError, match=r"begins with a TrainConfig.*got 'TextGame-v0'"):
        Trainer("TextGame-v0", tmp_path / "other")  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def test_lengths_and_held_out_rows_are_printed_before_any_episode(capsys: pytest.CaptureFixture[str]) -> None:
    file, options = (
        str(GSM8K),
        ["--model", "embedded", "--data.eval-fraction", "0.2", "--data.max-prompt-tokens", "200"],
    )
    assert main(["train", "--data.train", file, *options, "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "data: eval_fraction 0.2: 17 tasks train, 3 evaluate" in output.err
    assert "data: train: dropped 6 of 17 rows whose prompt is longer than 200 tokens" in output.err
    assert "and 6 held-out ones" in output.out


@pytest.mark.slow
def test_a_run_is_loaded_from_its_folder_and_goes_on(small_run: TrainConfig, tmp_path: Path) -> None:
    Trainer(replace(small_run, steps=1), tmp_path / "run").fit()
    again = Trainer.load(tmp_path / "run", steps=2)
    assert again.fit().steps == 2 and [line["step"] for line in again.metrics] == [1, 2]
    whole = again.save(tmp_path / "model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(whole) is not None and AutoTokenizer.from_pretrained(whole) is not None


@pytest.mark.long
def test_a_run_ends_well_inside_a_running_event_loop(small_run: TrainConfig, tmp_path: Path) -> None:
    import asyncio

    async def cell() -> int:
        return Trainer(replace(small_run, steps=1), tmp_path / "run").fit().steps

    assert asyncio.run(cell()) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(train=str(GSM8K)), "the data holds no tasks to evaluate on.*data.eval_fraction"),
        (DataConfig(eval=str(GSM8K)), "the data holds no tasks to train on"),
    ],
)
def test_a_run_without_the_tasks_that_it_needs_is_refused_before_it_writes_anything(
    on_rows: TrainConfig, data: DataConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(replace(on_rows, data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_command_line_names_the_evaluation_of_what_it_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", "--data.train", str(GSM8K), "--data.eval-fraction", "0.3", "--reward.function", "gsm8k"]
    short = ["--steps", "1", "--tasks", "2", "--group-size", "2", "--eval.episodes", "2", "--limits.turn-tokens", "8"]
    assert main([*run, *short, "--output", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    command = next(part for part in " ".join(output.split()).split("agentgym ") if part.startswith("eval "))
    assert main([*command.split(), "-n", "2", "--turn-tokens", "8", "--output", str(tmp_path / "eval")]) == 0
    assert "--reward.function gsm8k" in command and "--data.eval-fraction 0.3" in command


def test_the_advantage_may_be_named_apart_from_the_algo() -> None:
    config = TrainConfig(env="X", algo="ppo", advantage=AdvantageConfig(name="turn_gae", settings={"lam": 0.5}))
    assert resolve_config(config).advantage == AdvantageConfig(name="turn_gae", settings={"lam": 0.5})
