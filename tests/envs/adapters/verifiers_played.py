"""The tests that `test_verifiers.py` has run by an interpreter with the verifiers library."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentgym.cli.main import main
from agentgym.envs import TextEnv, make_env
from agentgym.envs.base.action import Action
from agentgym.errors import ConfigError, EnvironmentFault, UnknownName
from agentgym.testing import examine_env
from agentgym.types import JSON, MalformedCall, Message, ToolCall

pytestmark = pytest.mark.adapter
FILE = Path(__file__).with_name("verifiers_environments.py")
ID = f"verifiers/{FILE}"


def _made(**settings: JSON) -> TextEnv:
    return make_env(ID, settings)


def test_one_reply_is_scored_by_the_rubric() -> None:
    env = gymnasium.make(ID)
    observation, info = env.reset(seed=3)
    assert observation == "You write letters.\nWrite many a. (delta 3)"
    assert [message.role for message in info["messages"]] == ["system", "user"]
    observation, reward, terminated, truncated, info = env.step("aaab")
    assert (reward, terminated, truncated) == (0.75, True, False)
    assert info["metrics"] == {"share_of_a": 0.75, "said_word": 0.0, "num_turns": 1.0, "success": 1.0}


def test_a_seed_is_a_row_and_so_is_an_option() -> None:
    env = _made(num_rows=5)
    assert env.reset(seed=12)[0] == env.reset(seed=2)[0] == env.reset(options={"row": 2})[0]
    with pytest.raises(ConfigError, match="a number from 0 to 4, got 5"):
        env.reset(options={"row": 5})


def test_several_turns_are_played_on_the_environment_s_own_answers() -> None:
    env = _made(kind="guess")
    env.reset(seed=3)
    assert env.step("1")[:4] == ("Higher.", 0.0, False, False)
    observation, reward, terminated, _, info = env.step("3")
    assert (observation, reward, terminated) == ("Right.", 1.0, True)
    assert info["messages"] == (Message("user", "Right."),)
    env.reset(seed=3)
    for _ in range(4):
        assert not env.step("9")[2]
    assert env.step("9")[1:4] == (0.0, True, False)  # its own limit of turns ends a game, and is scored


def test_tools_are_shown_called_and_their_failures_told() -> None:
    env = _made(kind="sums")
    env.reset(seed=3)
    assert [(spec.name, spec.description) for spec in env.tool_specs] == [("add", "Adds two numbers.")]
    calls = (
        ToolCall("c1", "add", {"first": 9, "second": 3}),
        ToolCall("c2", "nope", {}),
        ToolCall("c3", "add", {"x": 1}),
        MalformedCall("c4", "{oops", "no JSON"),
    )
    _, reward, terminated, _, info = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
    assert (reward, terminated) == (0.0, False)
    results = info["tool_results"]
    assert [result.error for result in results] == [None, "unknown_tool", "tool_error", "malformed"]
    assert results[0].content == "12"
    assert [message.tool_call_id for message in info["messages"]] == ["c1", "c2", "c3", "c4"]
    assert env.step("12")[1:3] == (1.0, True)
    env.reset(seed=3)
    assert env.step("add 9 3")[0] == "12"  # as a person types it


@pytest.mark.parametrize(
    ("kind", "failure", "message"),
    [
        ("letters", "raises", "the rubric failed: share_of_a raised KeyError: 'no score'"),
        ("letters", "none", "the rubric failed: share_of_a gave None, not a number"),
        ("letters", "async", "the rubric failed: said_word raised ValueError: no judge"),
        ("guess", "turn", "the rollout raised RuntimeError: the host is on fire"),
    ],
)
def test_a_failure_of_the_environment_is_no_score(kind: str, failure: str, message: str) -> None:
    env = _made(kind=kind, failure=failure)
    env.reset(seed=1)
    with pytest.raises(EnvironmentFault, match=message):
        env.step("x")
    env.close()


def test_a_tool_whose_server_is_down_is_no_answer() -> None:
    env = _made(kind="sums", failure="tool")
    env.reset(seed=1)
    call = ToolCall("c1", "add_by_server", {"first": 9, "second": 3})
    with pytest.raises(EnvironmentFault, match="tool 'add_by_server' raised ConnectionError: the adder is down"):
        env.step(Action.from_message(Message("assistant", "", tool_calls=(call,))))
    env.close()


def test_32_rollouts_side_by_side_are_those_of_their_rows() -> None:
    async def game(seed: int) -> tuple[float, int]:
        env = _made(kind="guess", side_by_side=bool(seed % 2))
        await env.areset(seed=seed)
        low, high, turns = 0, 7, 0
        while True:
            turns, guess = turns + 1, (low + high) // 2
            observation, reward, over, *_ = await env.astep(str(guess))
            if over:
                await env.aclose()
                return reward, turns
            low, high = (guess + 1, high) if observation == "Higher." else (low, guess - 1)

    async def all_games() -> list[tuple[float, int]]:
        return await asyncio.gather(*(game(seed) for seed in range(32)))

    turns_of = [3, 2, 3, 1, 3, 2, 3, 4]
    assert asyncio.run(all_games()) == [(1.0, turns_of[seed % 8]) for seed in range(32)]


def test_an_episode_that_is_left_is_cleaned_up_and_signals_stay_the_program_s() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    env = _made(kind="guess", num_rows=3)
    env.reset(seed=0)
    env.reset(seed=1)
    rollout: Any = env.unwrapped
    running = rollout._rollout._ended
    env.close()
    assert running.cancelled()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_what_is_not_there_is_a_taught_error() -> None:
    with pytest.raises(UnknownName, match=r"verifiers has no 'no-such-game'.*env list --namespace verifiers"):
        make_env("verifiers/no-such-game")
    with pytest.raises(ConfigError, match=r"with the keywords {'size': 3}: .*unexpected keyword argument 'size'"):
        _made(size=3)
    with pytest.raises(ConfigError, match="rows is one of train, eval, got 'test'"):
        _made(rows="test")
    with pytest.raises(ConfigError, match="scores the rollouts of a group together"):
        _made(kind="ranked")


def test_env_check_reports_what_the_rubric_pays_for_nonsense() -> None:
    def failed(kind: str) -> set[str]:
        return {verdict.check for verdict in examine_env(ID, {"kind": kind}) if verdict.verdict == "failed"}

    assert (failed("guess"), failed("sums"), failed("letters")) == (set(), set(), {"canaries"})


def test_two_steps_of_training_move_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = ["train", "--env", ID, "--algo", "grpo", "--steps", "2", "--output", str(run)]
    assert main([*options, "--tasks", "4", "--eval.episodes", "8"]) == 0, capsys.readouterr().err
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    norms = [step["grad_norm"] for step in steps if "grad_norm" in step]
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms)
