"""LongRoad-v0: one early turn decides, every reply is a turn, luck is no part of winning, each turn is told anew."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict

import pytest

from agentgym.envs import EVAL_SEED_START, Action, make_env, policy_for
from agentgym.envs.base.text_env import StepResult, TextEnv
from agentgym.errors import ConfigError
from agentgym.testing import check_env
from agentgym.types import JSON, MalformedCall, Message, ToolCall

SEEDS = [*range(60), *range(EVAL_SEED_START, EVAL_SEED_START + 20)]


def play(env: TextEnv, kind: str, seed: int) -> list[StepResult]:
    """The steps of one episode."""
    observation, info = env.reset(seed=seed)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed)
    steps: list[StepResult] = [(observation, 0.0, False, False, info)]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(Action.from_message(policy.act(steps[-1][0]))))
    return steps


def calls(*pairs: tuple[str, dict[str, JSON]]) -> Action:
    tool_calls = [ToolCall(f"call_{number}", name, arguments) for number, (name, arguments) in enumerate(pairs)]
    return Action.from_message(Message("assistant", "", tool_calls=tuple(tool_calls)))


def walk(seed: int, item: str = "", **settings: JSON) -> list[StepResult]:
    """Takes the first way at every turn, and `item` (`right`, `wrong`, or nothing) where the keys lie."""
    env = make_env("LongRoad-v0", settings)
    observation, info = env.reset(seed=seed)
    chest = re.findall(r"\((\w+) chest\)", observation)[0]
    steps: list[StepResult] = [(observation, 0.0, False, False, info)]
    while not (steps[-1][2] or steps[-1][3]):
        here = re.findall(r"(\w+) key", observation.partition("Here: ")[2].partition("\n")[0])
        if here and item:
            colour = chest if item == "right" else next(option for option in here if option != chest)
            action = calls(("take", {"item": f"{colour} key"}))
        else:
            action = calls(("go", {"direction": re.findall(r"Exits: (\w+)", observation)[0]}))
        steps.append(env.step(action))
        observation = steps[-1][0]
    return steps


@pytest.mark.parametrize("settings", [{}, {"delayed": True}, {"length": 9, "luck": 0.25}])
def test_the_oracle_scores_one_and_the_cheat_zero(settings: dict[str, JSON]) -> None:
    env = make_env("LongRoad-v0", settings)
    for kind, score in (("oracle", 1.0), ("cheat", 0.0)):
        for seed in SEEDS:
            steps = play(env, kind, seed)
            paid = sum(step[1] for step in steps)
            assert paid == 1 if kind == "oracle" else -3.2 <= paid <= 0  # the cheat stumbles
            assert steps[-1][4]["metrics"]["success"] == score
            assert len(steps) - 1 == settings.get("length", 32)


def test_a_seed_gives_the_same_bytes_and_other_seeds_other_roads() -> None:
    for kind in ("oracle", "random", "cheat"):
        first, again = (json.dumps(play(make_env("LongRoad-v0"), kind, 5), default=asdict) for _ in range(2))
        assert first == again
    env = make_env("LongRoad-v0")
    assert len({env.reset(seed=seed)[0] for seed in range(500)}) > 450


def test_the_keys_lie_at_one_of_the_turns_two_to_five() -> None:
    turns_seen = set()
    for seed in range(40):
        turns = [number for number, step in enumerate(walk(seed), 1) if "Here: " in step[0]]
        assert len(turns) == 1
        turns_seen.add(turns[0])
    assert turns_seen == {2, 3, 4, 5}


@pytest.mark.parametrize("item", ["right", "wrong", ""])
@pytest.mark.parametrize("delayed", [False, True])
def test_the_key_that_was_taken_decides_and_is_paid_once(item: str, delayed: bool) -> None:
    for seed in range(10):
        steps = walk(seed, item, delayed=delayed, luck=0.0)
        won = item == "right"
        paid = [number for number, step in enumerate(steps) if step[1] != 0]
        turn = next(number for number, step in enumerate(steps, 1) if "Here: " in step[0])
        assert paid == ([32 if delayed else turn] if won else [])
        assert steps[-1][4]["metrics"]["success"] == won and steps[-1][2]
        assert ("opens" if won else "stays locked") in steps[-1][0]


def test_luck_is_paid_at_the_end_and_does_not_depend_on_winning() -> None:
    sums = {item: [sum(step[1] for step in walk(seed, item)) for seed in range(200)] for item in ("right", "")}
    assert all(step[1] == 0 for step in walk(3)[:-1])
    assert statistics.fmean(sums["right"]) == pytest.approx(1, abs=4 * 31**0.5 / 200**0.5)
    assert statistics.fmean(sums[""]) == pytest.approx(0, abs=4 * 31**0.5 / 200**0.5)
    assert statistics.stdev(sums["right"]) == pytest.approx(31**0.5, rel=0.2)


def test_every_reply_is_a_turn_and_its_first_call_alone_counts() -> None:
    for seed in range(12):
        env = make_env("LongRoad-v0", {"luck": 0.0})
        first = env.reset(seed=seed)[0]
        keys: list[str] = []
        while not keys:
            keys = re.findall(r"(\w+) key", env.step("hello")[0].partition("Here: ")[2])
        answer = env.step(calls(*(("take", {"item": f"{key} key"}) for key in keys)))
        assert f"Bag: {keys[0]} key" in answer[0]
        last = answer
        while not last[2]:
            last = env.step("hello")
        assert env.turns == 32
        assert last[4]["metrics"]["success"] == (f"({keys[0]} chest)" in first)


def test_each_turn_is_described_after_any_reply() -> None:
    env = make_env("LongRoad-v0")
    first = env.reset(seed=2)[0]
    broken = Action.from_message(Message("assistant", "", tool_calls=(MalformedCall("call_0", "{", "not JSON"),)))
    for action in (broken, calls(("fly", {})), calls(("look", {})), Action("hello"), broken):
        observation, *_, info = env.step(action)
        (message,) = info["history"]
        assert message.role == "user" and message.content.startswith(first.partition("\n")[0])
        assert observation.endswith(message.content)
    assert env.turns == 5


def test_a_reply_that_reaches_no_tool_stumbles_and_loses_nothing_else() -> None:
    broken = Action.from_message(Message("assistant", "", tool_calls=(MalformedCall("call_0", "{", "not JSON"),)))
    stumbles = (broken, calls(("fly", {})), calls(("take", {})), Action("hello"))
    for stumble in stumbles:
        env = make_env("LongRoad-v0", {"luck": 0.0})
        observation = env.reset(seed=4)[0]
        for _ in range(env.max_turns or 0):
            here = "Here: " in observation
            chest = re.findall(r"\((\w+) chest\)", observation)[0] if here else ""
            observation, reward, terminated, truncated, info = env.step(
                calls(("take", {"item": f"{chest} key"})) if here else stumble
            )
            assert reward == (1.0 if here else pytest.approx(-0.1))
        assert terminated and not truncated
        assert info["metrics"]["success"] == 1.0 and "opens" in observation


@pytest.mark.parametrize(
    ("settings", "message"), [({"length": 7}, "at least 8 turns, got 7"), ({"luck": -1}, "got -1")]
)
def test_impossible_settings_are_refused(settings: dict[str, JSON], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_env("LongRoad-v0", settings)


@pytest.mark.slow
def test_the_checks_find_nothing() -> None:
    assert check_env("LongRoad-v0") == []
