"""What a notebook does: an engine, an episode, an evaluation, a run, from the names of `agentgym` itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import agentgym
from agentgym.envs.games.guess_number import GuessNumber
from agentgym.errors import ConfigError, EngineError, RunFolderError, UnknownName
from agentgym.evaluation import run_episode
from agentgym.rollout.limits import Limits, SamplingConfig


@pytest.mark.long
def test_a_model_plays_the_same_episode_as_its_evaluation(tmp_path: Path) -> None:
    with agentgym.create_engine() as engine:
        first = agentgym.run_episode("GuessNumber-v0", engine, seed=5)
        again = agentgym.run_episode(GuessNumber, engine, seed=5)
        greedy = agentgym.run_episode("GuessNumber-v0", engine, seed=5, sampling=SamplingConfig(temperature=0.0))
        cut = agentgym.run_episode("GuessNumber-v0", engine, seed=5, limits=Limits(max_turns=1, turn_tokens=64))
    assert first.turns == again.turns and first.rows == again.rows and first.status.trainable
    assert greedy.rows != first.rows and len(cut.turns) == 1
    assert "agentgym-engine" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(EngineError, match="this engine is closed"):
        agentgym.run_episode("GuessNumber-v0", engine)
    engine.close()


def test_everything_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def cell() -> None:
        with agentgym.create_engine() as engine:
            assert agentgym.run_episode("TextGame-v0", engine, env_kwargs={"level": 1}).turns
        assert agentgym.run_episode("TextGame-v0", "oracle", seed=3).success
        assert agentgym.evaluate("TextGame-v0", "oracle", num_tasks=2, output=tmp_path / "eval").summary.success == 1.0

    asyncio.run(cell())


def test_an_evaluation_takes_an_environment_and_a_policy_or_a_configuration(tmp_path: Path) -> None:
    evaluation = agentgym.evaluate(GuessNumber, "oracle", num_tasks=3, output=tmp_path / "a")
    assert evaluation.summary.num_episodes == 3 and evaluation.config.env.endswith("guess_number:GuessNumber")
    config = agentgym.EvalConfig(env="GuessNumber-v0", num_tasks=3)
    assert agentgym.evaluate(config, "cheat", num_repeats=2, output=str(tmp_path / "b")).summary.num_episodes == 6
    with pytest.raises(ConfigError, match="'num_taks': did you mean 'num_tasks'"):
        agentgym.evaluate("GuessNumber-v0", "oracle", num_taks=3)


def test_missing_names_are_refused_before_any_episode(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'TextGame-v0'"):
        run_episode("TextGme-v0", "oracle")
    with pytest.raises(ConfigError, match=r"create_engine\('gpt'\) loads a model"):
        run_episode("TextGame-v0", "gpt")
    with pytest.raises(RunFolderError):
        agentgym.create_engine(tmp_path / "nothing")
    with pytest.raises(UnknownName, match="Known: local, sglang, vllm"):
        agentgym.create_engine(kind="tgi")
    assert "agentgym-engine" not in [thread.name for thread in threading.enumerate()]


def test_the_names_of_the_package_cost_nothing_until_they_are_used() -> None:
    program = "import sys, agentgym; agentgym.evaluate; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        getattr(agentgym, "Trainr")  # noqa: B009 - a name that the type checker knows not to be there
