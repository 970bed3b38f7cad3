"""GuessNumber-v0 and WordLadder-v0: honest seeds, many tasks, oracles that win, cheats that do not."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from agentgym.envs import EVAL_SEED_START, Action, TextEnv, make_env, policy_for
from agentgym.envs.catalog.plugin import register_envs
from agentgym.envs.games.word_ladder import distances_from, neighbours
from agentgym.errors import ConfigError
from agentgym.testing import check_env
from agentgym.types import Message, ToolCall

IDS = ("GuessNumber-v0", "WordLadder-v0")
LEVELS = (1, 2, 3)
CASES = [(env_id, level) for env_id in IDS for level in LEVELS]
register_envs()


def play(env: TextEnv, kind: str, seed: int) -> list[Any]:
    """The steps of one episode."""
    observation, info = env.reset(seed=seed)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed)
    steps: list[Any] = [(observation, 0.0, False, False, info)]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(Action.from_message(policy.act(steps[-1][0]))))
    return steps


@pytest.mark.parametrize(("env_id", "level"), CASES)
def test_the_oracle_scores_one(env_id: str, level: int) -> None:
    env = make_env(env_id, {"level": level})
    for seed in [*range(100), *range(EVAL_SEED_START, EVAL_SEED_START + 20)]:
        steps = play(env, "oracle", seed)
        assert sum(step[1] for step in steps) == 1.0
        assert steps[-1][2]
        assert steps[-1][4]["metrics"]["success"] == 1.0


@pytest.mark.parametrize(("env_id", "level"), CASES)
def test_the_cheat_scores_zero(env_id: str, level: int) -> None:
    env = make_env(env_id, {"level": level})
    for seed in range(100):
        steps = play(env, "cheat", seed)
        assert sum(step[1] for step in steps) == 0.0
        assert steps[-1][3]
        assert steps[-1][4]["metrics"]["success"] == 0.0


@pytest.mark.long
@pytest.mark.parametrize("num_tasks", [1000, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("env_id", "level"), CASES)
def test_a_seed_gives_the_same_bytes_and_other_seeds_other_tasks(env_id: str, level: int, num_tasks: int) -> None:
    def episode(seed: int, kind: str) -> str:
        steps = play(make_env(env_id, {"level": level}), kind, seed)
        return json.dumps(steps, default=asdict)

    for seed in (0, 7, EVAL_SEED_START):
        for kind in ("oracle", "random", "cheat"):
            assert episode(seed, kind) == episode(seed, kind)
    env = make_env(env_id, {"level": level})
    tasks = {env.reset(seed=seed)[0] for seed in range(num_tasks)}
    assert len(tasks) > 0.5 * num_tasks


@pytest.mark.long
@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_makes_checks_and_renders_it(env_id: str) -> None:
    env = gymnasium.make(env_id, level=2, render_mode="ansi")
    observation, _ = env.reset(seed=0)
    assert env.render() == observation
    env.close()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have.*")
        gymnasium_check_env(gymnasium.make(env_id).unwrapped)
    assert check_env(env_id) == []


@pytest.mark.parametrize("env_id", IDS)
def test_an_unknown_level_is_refused(env_id: str) -> None:
    with pytest.raises(ConfigError, match="levels 1, 2, 3; got level 4"):
        make_env(env_id, {"level": 4})


def test_only_the_first_guess_of_a_reply_counts() -> None:
    env = make_env("GuessNumber-v0")
    observation, _ = env.reset(seed=1)
    low = int(observation.split("from ")[1].split(" ")[0])
    calls = tuple(ToolCall(str(number), "guess", {"value": low + number - 1}) for number in range(9))
    observation, reward, terminated, *_ = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
    assert (reward, terminated) == (0.0, False)
    assert observation.count("Not counted") == 8


def test_ladders_go_by_known_words_that_differ_in_one_letter() -> None:
    env = make_env("WordLadder-v0", {"level": 2})
    observation, _ = env.reset(seed=0)
    start, goal = observation.removesuffix(".").removeprefix("Start: ").split(". Goal: ")
    assert 3 <= distances_from(start)[goal] <= 5
    assert "is not in the word list" in env.step("change zzz")[0]
    assert "exactly one letter" in env.step(f"change {goal}")[0]
    assert env.step(f"change {neighbours()[start][0]}")[0].startswith(f"The word is {neighbours()[start][0]}")
