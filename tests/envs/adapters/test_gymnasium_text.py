"""Gymnasium's small environments as text: the same episode, told and played in words."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentgym.cli.main import main
from agentgym.envs import Action, TextEnv, make_env
from agentgym.envs.adapters.gymnasium_text import GymnasiumText
from agentgym.errors import ConfigError
from agentgym.testing import check_env
from agentgym.types import Message, ToolCall

WAY = ("down", "down", "right", "right", "down", "right")


def act(env: TextEnv, *actions: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    calls = tuple(ToolCall(f"call_{number}", "act", {"action": action}) for number, action in enumerate(actions))
    return env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))


def test_the_way_over_the_ice_is_paid_by_calls_and_by_words() -> None:
    env = make_env("text/FrozenLake-v1", {"is_slippery": False})
    for play in (lambda word: act(env, word), lambda word: env.step(f"I go {word}.")):
        env.reset(seed=0)
        results = [play(word) for word in WAY]
        assert [reward for _, reward, *_ in results] == [0, 0, 0, 0, 0, 1]
        assert results[0][0].startswith("Reward: 0.\n  (Down)\nSFFF\n[F|red]HFH\n")
        assert results[-1][2:4] == (True, False)
        assert "success" not in results[-1][4]["metrics"]


def test_an_episode_is_that_of_gymnasium_under_the_same_seed() -> None:
    theirs, ours = gymnasium.make("Blackjack-v1"), make_env("text/Blackjack-v1")
    for seed in range(20):
        observation, _ = theirs.reset(seed=seed)
        assert ours.reset(seed=seed)[0] == f"Observation: {tuple(int(number) for number in observation)}"
        ended = False
        while not ended:
            observation, reward, ended, *_ = theirs.step(1)
            text, paid, terminated, *_ = act(ours, "hit")
            assert (paid, terminated) == (reward, ended)
            assert text.endswith(f"Observation: {tuple(int(number) for number in observation)}")


def test_a_reply_that_names_no_action_or_several_plays_none() -> None:
    env = make_env("text/FrozenLake-v1", {"is_slippery": False})
    env.reset(seed=0)
    assert env.step("Which way?")[0].startswith("Nothing was done: the reply names no action.")
    assert env.step("down or right")[0].startswith("Nothing was done: the reply names 2 actions.")
    assert "Not done: one action in each reply." in act(env, "down", "down")[0]
    answer = act(env, "north")
    assert answer[4]["tool_results"][0].error == "invalid_arguments"
    assert env.step("down")[0].count("[F|red]FFH") == 1  # the second row: one step was taken before


class Dice(gymnasium.Env[Any, Any]):
    """Draws from the process's random numbers, as no environment should, and may take its time."""

    observation_space = gymnasium.spaces.Discrete(100)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Throws."""
        return random.randrange(100), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Throws again."""
        time.sleep(self.step_s)
        return random.randrange(100), 0.0, False, False, {}


@pytest.fixture
def dice() -> Iterator[str]:
    """The id of an environment that somebody registered."""
    gymnasium.register("Dice-v0", f"{__name__}:Dice", max_episode_steps=20)
    yield "text/Dice-v0"
    del gymnasium.registry["Dice-v0"]


def test_a_stranger_s_environment_draws_from_a_stream_of_its_own(dice: str) -> None:
    def thrown() -> list[str]:
        env = make_env(dice)
        texts = [env.reset(seed=7)[0], *(act(env, "0")[0] for _ in range(5))]
        env.close()
        return texts

    random.seed(1)
    before = random.getstate()
    first = thrown()
    assert random.getstate() == before
    random.seed(2)
    assert thrown() == first


def test_a_slow_environment_blocks_no_other_and_its_time_out_is_not_the_models(dice: str) -> None:
    slow = make_env(dice, {"step_s": 0.8})
    assert isinstance(slow, GymnasiumText) and not slow.runs_inline
    assert slow.tools["act"].timeout_s is None

    async def run() -> int:
        await slow.areset(seed=0)
        playing = asyncio.create_task(slow.astep("0"))
        ticks = 0
        while not playing.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await slow.aclose()
        return ticks

    assert asyncio.run(run()) > 5


def test_a_limit_of_gymnasium_truncates() -> None:
    env = make_env("text/FrozenLake-v1", {"is_slippery": False})
    env.reset(seed=0)
    results = [act(env, "left") for _ in range(100)]
    assert results[-1][2:4] == (False, True)
    assert not any(result[3] for result in results[:-1])


def test_colours_are_words() -> None:
    assert "[Y|magenta]" in make_env("text/Taxi-v4").reset(seed=0)[0]


@pytest.mark.parametrize(("env_id", "words"), [("Pendulum-v1", "cannot be played"), ("CartPole-v1", None)])
def test_spaces_that_text_cannot_express_are_refused(env_id: str, words: str | None) -> None:
    if words is not None:
        with pytest.raises(ConfigError, match=words):
            make_env(f"text/{env_id}")
        return
    env = make_env(f"text/{env_id}")
    assert env.reset(seed=0)[0].startswith("Observation: [")
    assert act(env, "1")[1] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Blackjack-v1", "FrozenLake-v1", "Taxi-v4"])
def test_env_check_finds_nothing(env_id: str) -> None:
    assert check_env(f"text/{env_id}") == []


@pytest.mark.slow
def test_env_check_tells_of_an_environment_that_starts_alike_under_every_seed() -> None:
    assert [finding.check for finding in check_env("text/CliffWalking-v1")] == ["ignored seed"]


HERE = "tests.envs.adapters.plain_environments"
FILE = "tests/envs/adapters/plain_environments.py"


@pytest.mark.parametrize("name", [f"{HERE}:Echo", f"{FILE}:Echo", f"{HERE}:PlainEcho-v0", "PlainEcho-v0"])
def test_an_environment_of_gymnasiums_interface_is_played_by_any_name(name: str) -> None:
    make_env(f"{HERE}:PlainEcho-v0").close()  # importing the module registers the id
    env = make_env(name, {"digits": 3})
    assert isinstance(env, GymnasiumText)
    observation, _ = env.reset(seed=7)
    again, _ = env.reset(seed=7)
    assert observation == again != env.reset(seed=8)[0]
    _, reward, terminated, truncated, _ = env.step(f"It is {env.reset(seed=7)[0].split()[1]}")
    assert (reward, terminated, truncated) == (1.0, True, False)


def test_its_drawing_its_limit_and_its_wrappers_are_kept() -> None:
    env = make_env(f"{HERE}:PlainCorridor-v0")
    assert env.max_turns == 5
    assert env.reset(seed=0)[0] == "x...\nObservation: 0"
    results = [env.step(action) for action in "11011"]
    assert [reward for _, reward, *_ in results] == [0, 0, 0, 0, 1]
    assert results[2][0].startswith("Reward: 0.\n.x..")
    assert make_env(f"{HERE}:Corridor").reset(seed=0)[0] == "x...\nObservation: 0"
    assert make_env(f"{HERE}:Undrawn").reset(seed=0)[0] == "Observation: 0"


def test_each_space_that_text_cannot_express_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=rf"{HERE}:Wide cannot be shown as text: its observations are Box"):
        make_env(f"{HERE}:Wide")
    with pytest.raises(ConfigError, match="does not take the keywords"):
        make_env(f"{HERE}:Echo", {"digit": 3})


@pytest.mark.long
def test_commands_evaluate_and_train_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--env", f"{FILE}:Echo", "-n", "2", "--output", str(tmp_path / "eval"), "--json"]) == 0
    small = "--steps 1 --tasks 2 --group-size 2 --eval.episodes 0 --limits.max-turns 2"
    run = tmp_path / "run"
    assert main(["train", "--env", f"{HERE}:PlainEcho-v0", *small.split(), "--output", str(run)]) == 0
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
