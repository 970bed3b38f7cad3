"""A wrapper of Gymnasium around a text environment counts wherever the environment is played."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import gymnasium
import pytest
from gymnasium.envs.registration import WrapperSpec
from gymnasium.wrappers import (
    DelayObservation,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformAction,
    TransformObservation,
    TransformReward,
)

from agentgym import ToolEnv, evaluate, tool
from agentgym.cli.main import main
from agentgym.envs import TextEnv, make_env
from agentgym.envs.base.action import Action
from agentgym.envs.base.card import EnvCard
from agentgym.envs.base.text_env import EpisodeOver
from agentgym.errors import ConfigError
from agentgym.rollout.sampling.self_play import seats_of
from agentgym.testing import examine_env
from agentgym.trajectory import Trajectory
from agentgym.types import Message, ToolCall

Env = gymnasium.Env[Any, Any]


class Count(ToolEnv):
    system_prompt = "Count."
    tools_optional = True
    max_turns = 6
    card = EnvCard(task="Count.", reward="0.25 for each call.", tools=("look",))

    def start(self, options: dict[str, Any]) -> str:
        return f"Task {int(self.np_random.integers(10**6))}."

    def on_message(self, text: str) -> str:
        self.reward += 0.25
        return f"you said {text}"

    @tool
    def look(self, number: int = 1) -> str:
        """Looks around."""
        self.reward += 0.25
        return f"room {number}\na door"


class AsyncCount(Count):
    async def start(self, options: dict[str, Any]) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().start(options)


class InlineCount(Count):
    runs_inline = True


class Double(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return 2 * float(reward)


class Hints(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds a text to each observation, and ends the episode at its second turn."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.left = 2
        observation, info = self.env.reset(seed=seed, options=options)
        return f"Hint: count.\n{observation}", info

    def step(self, action: Any) -> Any:
        self.left -= 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return f"{observation}\n{self.left} left", reward, terminated, truncated or not self.left, info


class Twice(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Plays each reply twice."""

    def step(self, action: Any) -> Any:
        first = self.env.step(action)
        if first[2] or first[3]:
            return first
        observation, reward, *rest = self.env.step(action)
        return f"{first[0]} / {observation}", float(first[1]) + float(reward), *rest


STACKS: dict[str, Callable[[Env], Env]] = {
    "rewards": Double,
    "TransformReward": lambda env: TransformReward(env, lambda reward: float(reward) - 1),
    "TransformObservation": lambda env: TransformObservation(env, str.upper, None),
    "TransformAction": lambda env: TransformAction(env, lambda text: str(text).replace("look", "look "), None),
    "a limit inside": lambda env: Double(TimeLimit(env, 2)),
    "statistics": lambda env: RecordEpisodeStatistics(TimeLimit(Double(env), 3)),
    "reset and end": Hints,
    "two steps": Twice,
    "a delay": lambda env: DelayObservation(env, 1),
}
MADE_BY = {kind.__name__: kind for kind in (Count, AsyncCount, InlineCount)}


def wrapped(stack: str, kind: str) -> Env:
    return STACKS[stack](MADE_BY[kind]())


def wrapped_rewards(render_mode: str | None = None) -> Env:
    return Double(Count(render_mode))


@contextlib.contextmanager
def registered(entry_point: Any, **settings: Any) -> Iterator[str]:
    gymnasium.register("Wrapped-v0", entry_point, **settings)
    try:
        yield "Wrapped-v0"
    finally:
        del gymnasium.registry["Wrapped-v0"]


def answers_of(env: Env, trajectory: Trajectory) -> list[tuple[Any, ...]]:
    """Returns the observations, rewards and ends that an environment gives to the replies of an episode."""
    env.reset(seed=trajectory.task.seed)
    answers = [env.step(Action.from_message(turn.message))[:4] for turn in trajectory.turns]
    env.close()
    return answers


@pytest.mark.parametrize(("stack", "kind"), [*zip(STACKS, itertools.cycle(MADE_BY))])
def test_an_evaluation_gives_the_rewards_texts_and_ends_of_gymnasium(
    stack: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with registered(functools.partial(wrapped, stack, kind), max_episode_steps=5) as name:
        (trajectory,) = evaluate(name, "random", num_tasks=1, output=tmp_path / "run").trajectories
        answers = answers_of(gymnasium.make(name), trajectory)
        assert [turn.reward for turn in trajectory.turns] == [answer[1] for answer in answers]
        assert [turn.observation for turn in trajectory.turns] == [answer[0] for answer in answers]
        assert [answer[2] or answer[3] for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert str(trajectory.status) == "truncated" and trajectory.success is False
        parts_by_turn = [turn.messages or turn.tool_results for turn in trajectory.turns]
        assert ["\n".join(part.content for part in parts) for parts in parts_by_turn] == [
            answer[0] for answer in answers
        ]
        assert main(["verify", "--deep", str(tmp_path / "run")]) == 0
        assert "replay" in capsys.readouterr().out


WAYS: dict[str, dict[str, Any]] = {
    "additional_wrappers": {
        "entry_point": Count,
        "additional_wrappers": (WrapperSpec("Double", f"{__name__}:Double", {}),),
    },
    "the entry point": {"entry_point": wrapped_rewards},
    "the entry point as text": {"entry_point": f"{__name__}:wrapped_rewards"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_of_an_id_counts_in_every_command(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with registered(**WAYS[way], max_episode_steps=3) as name:
        vector = gymnasium.make_vec(name, num_envs=1)
        vector.reset(seed=0)
        paid = [vector.step(("look",))[1].item() for _ in range(3)]
        vector.close()
        assert paid == [0.5] * 3
        assert evaluate(name, "random", num_tasks=1, output=tmp_path / "python").summary.mean_reward == 1.5
        assert main(["eval", "--env", name, "--policy", "random", "-n", "1", "--output", str(tmp_path / "run")]) == 0
        assert "1.500" in capsys.readouterr().out
        typed = iter(["look\n"] * 3)
        monkeypatch.setattr("sys.stdin", cast(Any, _Typed(typed)))
        assert main(["play", name]) == 0
        assert "no success: reward 1.5 after 3 turns" in capsys.readouterr().out


class _Typed:
    def __init__(self, lines: Iterator[str]) -> None:
        self.readline = lambda: next(lines, "")

    def isatty(self) -> bool:
        return False


def test_a_function_that_returns_a_wrapped_environment_is_one(tmp_path: Path) -> None:
    played = evaluate(wrapped_rewards, "random", num_tasks=1, output=tmp_path / "run")  # type: ignore[arg-type]
    assert played.summary.mean_reward == 3.0


@pytest.mark.parametrize(("limit", "turns"), [(3, 3), (6, 6), (9, 6), (None, 6)])
def test_the_smaller_limit_of_turns_counts(limit: int | None, turns: int) -> None:
    for entry_point in (Count, wrapped_rewards):
        with registered(entry_point, max_episode_steps=limit) as name:
            with contextlib.closing(make_env(name)) as env:
                assert env.max_turns == turns
                env.reset(seed=0)
                results = [env.step("hm") for _ in range(turns)]
            assert [result[3] for result in results] == [False] * (turns - 1) + [True]
            assert results[-1][4]["metrics"]["success"] == 0


@pytest.mark.parametrize("stack", ["statistics", "reset and end", "TransformObservation"])
def test_env_check_finds_nothing_wrong_with_a_wrapper(stack: str) -> None:
    checks = [*("makes", "Gymnasium", "reproducible", "dropped observation", "unserialisable info", "no turn limit")]
    checks += ["unanswered calls", "step after the end", "close twice", "async", "reward range", "fork"]
    verdicts = examine_env(cast(Any, functools.partial(wrapped, stack, "Count")), only=checks)
    assert [verdict.findings for verdict in verdicts] == [()] * len(checks)


def calls(*numbers: int) -> Action:
    tool_calls = tuple(ToolCall(f"call_{number}", "look", {"number": number}) for number in numbers)
    return Action.from_message(Message("assistant", "", tool_calls=tool_calls))


CHANGES: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "as many lines": (str.upper, ["ROOM 1\nA DOOR", "ROOM 2\nA DOOR"]),
    "more lines": (lambda text: f"{text}\nGo on.", ["room 1\na door", "room 2\na door\nGo on."]),
    "fewer lines": (lambda text: "Nothing.", ["Nothing.", ""]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_answer_to_two_calls_still_answers_both(change: str) -> None:
    function, contents = CHANGES[change]
    env = make_env_of(lambda: TransformObservation(Count(), function, None))
    env.reset(seed=0)
    *_, info = env.step(calls(1, 2))
    assert [message.content for message in info["messages"]] == contents
    assert [message.tool_call_id for message in info["messages"]] == ["call_1", "call_2"]
    env.close()


def make_env_of(make: Callable[[], Env]) -> TextEnv:
    with registered(lambda **_: make()) as name:
        return make_env(name)


def test_a_wrapper_whose_actions_are_numbers_is_played_by_one_tool() -> None:
    words = ("look", "hello")
    env = make_env_of(lambda: TransformAction(Count(), lambda number: words[number], gymnasium.spaces.Discrete(2)))
    assert [spec.name for spec in env.tool_specs] == ["act"]
    env.reset(seed=0)
    observation, reward, *_ = env.step("1")
    assert (observation, reward) == ("Reward: 0.25.\nyou said hello", 0.25)
    env.close()


def test_messages_that_a_wrapper_wrote_itself_stay() -> None:
    class Own(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            _, reward, terminated, truncated, info = self.env.step(action)
            return "short", reward, terminated, truncated, {**info, "messages": (Message("user", "long"),)}

    env = make_env_of(lambda: Own(Count()))
    env.reset(seed=0)
    assert env.step("hm")[4]["messages"] == (Message("user", "long"),)


def test_a_wrapped_environment_has_the_attributes_of_its_layers() -> None:
    class Named(gymnasium.Wrapper[Any, Any, Any, Any]):
        system_prompt = "Count well."

    env = make_env_of(lambda: Named(TimeLimit(Count(), 1)))
    env.reset(seed=0)
    assert env.system_prompt == "Count well." and env.max_turns == 1 and type(env.unwrapped) is Count
    assert [spec.name for spec in env.tool_specs] == ["look"] and env.task_digest
    assert env.card is not None and env.card.task == "Count." and env.card.reward_range[1] == float("inf")
    env.step("hm")
    with pytest.raises(EpisodeOver, match="after the episode ended"):
        env.step("hm")
    env.close()


def test_self_play_names_a_wrapper_that_it_would_leave_out() -> None:
    env = make_env("TicTacToe-v0", {"opponent": "self"})
    assert seats_of(env) == ("X", "O")
    with pytest.raises(ConfigError, match="would leave out the wrappers of <Double"):
        seats_of(Double(env))
