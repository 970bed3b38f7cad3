"""Training and evaluation give a reply the same room, and a reply that is cut is named."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentgym.embedded import embedded_folder
from agentgym.engines.local.config import LocalSettings
from agentgym.evaluation import EvalConfig, evaluate
from agentgym.evaluation.play.evaluate import open_evaluation
from agentgym.model.model_folder import load_decoder
from agentgym.model.model_name import model_folder
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.dry_run import describe_plan
from agentgym.trainers.loop.token_budget import with_token_budget
from agentgym.trainers.parts.engine import open_engine
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.tasks.practice import PracticeConfig

Train = Callable[..., Any]


@pytest.fixture
def guesses() -> TrainConfig:
    """One step of a game that the embedded model does not know, so that it rambles."""
    return TrainConfig(
        env="GuessNumber-v0",
        steps=1,
        tasks=1,
        group_size=2,
        eval=HeldOutConfig(episodes=3),
    )


@pytest.mark.parametrize(("env", "tokens"), [("TextGame-v0", 256), ("Math-v0", 2048), ("LongRoad-v0", 256)])
def test_training_and_evaluation_have_one_default_for_the_length_of_a_reply(
    env: str, tokens: int, tmp_path: Path
) -> None:
    trained = with_token_budget(TrainConfig(env=env)).limits
    plan = open_evaluation(EvalConfig(env=env, num_tasks=1), tmp_path / "eval")
    with closing(plan.folder):
        evaluated = plan.config
    assert trained.turn_tokens == evaluated.turn_tokens == tokens
    assert trained.max_turns == evaluated.max_turns


def test_the_longest_replies_of_a_mix_decide() -> None:
    config = TrainConfig(env="TextGame-v0", practice=PracticeConfig(mix={"TextGame-v0": 1, "Math-v0": 1}))
    assert with_token_budget(config).limits.turn_tokens == 1024


def test_the_plan_names_the_most_tokens_of_a_reply() -> None:
    plan = {name: number for name, number, _ in describe_plan(TrainConfig(env="TextGame-v0"))}
    assert plan["most tokens per reply"] == 256


@pytest.mark.parametrize(("limit", "window"), [(None, 1024), (300, 300), (9999, 1024)])
def test_the_engine_reserves_no_more_tokens_than_an_episode_may_have(
    limit: int | None, window: int, tmp_path: Path
) -> None:
    config = TrainConfig(env="TextGame-v0", limits=Limits(context_window=limit), local=LocalSettings(num_slots=4))
    model = load_decoder(embedded_folder())
    assert model.context_window == 1024

    async def reserved() -> int:
        engine = await open_engine(config, model, embedded_folder(), version=0, log_folder=tmp_path)
        await engine.close()
        return engine.context_window

    assert asyncio.run(reserved()) == window


@pytest.mark.slow
def test_held_out_play_of_training_and_an_evaluation_by_default_have_the_same_ids(
    guesses: TrainConfig, train: Train, tmp_path: Path
) -> None:
    train(guesses, tmp_path / "run")
    limits = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["limits"]
    assert limits["turn_tokens"] == load_decoder(model_folder(guesses.model)).context_window // 4 == 512
    before = [record.trajectory for record in read_episodes(tmp_path / "run") if record.phase == "eval_before"]
    played = evaluate(EvalConfig(env="GuessNumber-v0", num_tasks=3), output=tmp_path / "eval").trajectories
    assert [trajectory.rows for trajectory in before] == [trajectory.rows for trajectory in played]


def test_a_run_whose_replies_are_cut_names_the_limit_and_not_the_format(
    guesses: TrainConfig, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    train(replace(guesses, steps=2, eval=HeldOutConfig(episodes=0), limits=Limits(turn_tokens=4)), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["replies_cut"], line["longest_reply"]) for line in lines] == [(2, 4), (2, 4)]
    assert lines[1]["signs"][:2] == ["replies_cut", "dead_groups"]
    assert "--limits.turn-tokens" in lines[1]["warnings"][0]
    assert "call format" not in caplog.text
