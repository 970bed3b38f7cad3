"""GEM's environments under `gymnasium.make`."""

from __future__ import annotations

import gymnasium
import pytest

from agentgym.envs import make_env
from agentgym.errors import ConfigError, UnknownName
from agentgym.testing import examine_env

pytestmark = pytest.mark.adapter
GUESS = "gem/game:GuessTheNumber-v0-easy"


def test_a_game_is_played_to_its_end_and_the_reward_is_its_own() -> None:
    env = gymnasium.make(GUESS)
    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        assert observation.endswith("Enter your next guess.")
        low, high, terminated, reward = 1, 10, False, 0.0
        while not terminated:
            guess = (low + high) // 2
            observation, reward, terminated, _, info = env.step(f"\\boxed{{{guess}}}")
            low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
        assert (reward, info["metrics"]["success"]) == (1.0, 1.0)


def test_a_reply_of_the_wrong_form_ends_and_costs_what_gem_takes() -> None:
    env = make_env(GUESS)
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("seven")
    assert observation == "At turn 1, you did not provide a valid guess."
    assert (reward, terminated, truncated, info["metrics"]["success"]) == (-0.1, True, False, 0.0)


def test_a_reply_to_a_question_of_reasoning_gym_is_not_run_as_python() -> None:
    env = make_env("gem/rg:n_queens")
    env.reset(seed=0)
    assert env.step("\\boxed{[row.split() for row in valid_solutions[0].split(chr(10))]}")[1] == 0.0
    env.reset(seed=0)
    answer = env.unwrapped._env.unwrapped.data["metadata"]["valid_answers"][0]  # type: ignore[attr-defined]
    board = str([row.split() for row in answer.split("\n")])
    assert env.step(f"\\boxed{{{board}}}")[1] == 0.5


def test_what_is_not_there_is_a_taught_error() -> None:
    with pytest.raises(UnknownName, match="did you mean 'game:Sudoku-v0-easy'"):
        make_env("gem/game:Sudoku-v0-eas")
    with pytest.raises(ConfigError, match="GEM's math:GSM8K cannot be made here: "):
        make_env("gem/math:GSM8K")


def test_env_check_tells_of_what_gem_takes_off_and_of_nothing_else() -> None:
    failed = {verdict.check for verdict in examine_env(GUESS) if verdict.verdict == "failed"}
    assert failed <= {"canaries"}
