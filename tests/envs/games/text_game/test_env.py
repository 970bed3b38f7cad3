"""TextGame-v0: who wins it, how many tasks it has, its rewards and turn limit, and what a person types."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.envs import EVAL_SEED_START, Action, TextEnv, policy_for
from agentgym.envs.games.text_game.env import TextGame
from agentgym.envs.games.text_game.explorer import GameCall
from agentgym.envs.games.text_game.world import LEVELS, TextGameWorld, make_text_game_world
from agentgym.errors import ConfigError
from agentgym.testing import check_env
from agentgym.types import MalformedCall, Message, ToolCall

ALL_LEVELS = pytest.mark.parametrize("level", LEVELS)
Step = tuple[str, float, bool, bool, dict[str, Any]]


def action(name: str, **arguments: Any) -> Action:
    """A reply with one call."""
    return Action.from_message(Message("assistant", "", tool_calls=(ToolCall("call_0", name, arguments),)))


def play(env: TextEnv, kind: str, seed: int) -> list[Step]:
    """The steps of one episode; the first is the reset."""
    observation, info = env.reset(seed=seed)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed)
    steps: list[Step] = [(observation, 0.0, False, False, info)]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(Action.from_message(policy.act(steps[-1][0]))))
    return steps


def world_of(level: int, seed: int) -> TextGameWorld:
    return make_text_game_world(np.random.default_rng(seed), level)


# ---- who wins


@pytest.mark.long
@ALL_LEVELS
def test_the_oracle_wins_every_seed_within_the_turn_limit(level: int) -> None:
    env = TextGame(level)
    for seed in [*range(300), *range(EVAL_SEED_START, EVAL_SEED_START + 50)]:
        steps = play(env, "oracle", seed)
        assert steps[-1][2] and not steps[-1][3]
        assert sum(step[1] for step in steps) == 1.0
        assert steps[-1][4]["metrics"]["success"] == 1.0
        assert len(steps) - 1 <= env.play.world.max_turns


@ALL_LEVELS
def test_the_cheat_scores_zero(level: int) -> None:
    env = TextGame(level)
    for seed in range(100):
        steps = play(env, "cheat", seed)
        assert sum(step[1] for step in steps) == 0.0
        assert steps[-1][4]["metrics"]["success"] == 0.0


def test_the_random_player_wins_now_and_then() -> None:
    env = TextGame(1)
    assert 0 < sum(play(env, "random", seed)[-1][1] for seed in range(100)) < 60


# ---- seeds and tasks


@ALL_LEVELS
def test_the_same_seed_and_replies_give_the_same_bytes(level: int) -> None:
    for seed in (0, 5, EVAL_SEED_START):
        for kind in ("oracle", "random", "cheat"):
            first, again = (json.dumps(play(TextGame(level), kind, seed), default=asdict) for _ in range(2))
            assert first == again


@pytest.mark.long
@pytest.mark.parametrize("num_tasks", [1000, pytest.param(3000, marks=pytest.mark.slow)])
@ALL_LEVELS
def test_there_are_thousands_of_tasks_and_the_held_out_ones_are_others(level: int, num_tasks: int) -> None:
    env = TextGame(level)
    training = range(num_tasks)
    assert len({env.reset(seed=seed)[0] for seed in training}) > 0.9 * num_tasks
    worlds = {repr(world_of(level, seed)) for seed in training}
    assert len(worlds) == len(training)
    assert not worlds & {repr(world_of(level, EVAL_SEED_START + number)) for number in range(num_tasks // 6)}


@ALL_LEVELS
def test_a_world_has_the_size_of_its_level(level: int) -> None:
    spec = LEVELS[level]
    for seed in range(200):
        world = world_of(level, seed)
        things = [thing for items in world.items.values() for thing in items]
        contents = [container.content for containers in world.containers.values() for container in containers]
        everything = things + contents
        assert spec.rooms[0] <= len(world.exits) <= spec.rooms[1]
        assert sum(len(exits) for exits in world.exits.values()) == 2 * (len(world.exits) - 1)
        assert len(set(everything)) == len(everything)
        assert set(everything) > world.needed
        assert len(set(everything) - world.needed) == spec.decoys
        assert len(contents) == spec.chest + spec.box
        assert sum(bool(out.door) for exits in world.exits.values() for out in exits.values()) == 2 * spec.door


def test_the_level_of_an_episode_is_an_option() -> None:
    env = TextGame(1)
    assert "chest" not in env.reset(seed=0)[0].splitlines()[0]
    assert "chest" in env.reset(seed=0, options={"level": 2})[0].splitlines()[0]
    with pytest.raises(ConfigError, match="no level 9; levels are 1 to 5"):
        TextGame(9)
    with pytest.raises(ConfigError, match="no level 9"):
        env.reset(seed=0, options={"level": 9})


def test_losing_ends_the_episode_without_reward() -> None:
    env = TextGame(1)
    for seed in range(50):
        env.reset(seed=seed)
        if cursed := [item for item in env.play.items[env.play.room] if item not in env.play.world.needed]:
            _, reward, terminated, truncated, info = env.step(action("take", item=cursed[0]))
            assert (reward, terminated, truncated, info["metrics"]["success"]) == (0.0, True, False, 0.0)
            return
    pytest.fail("no first room had a cursed thing")


# ---- turns and rewards


@ALL_LEVELS
def test_the_turn_limit_truncates(level: int) -> None:
    env = TextGame(level)
    env.reset(seed=3)
    steps = [env.step(action("look")) for _ in range(env.play.world.max_turns)]
    assert [step[3] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert not any(step[1] or step[2] for step in steps)
    assert steps[-1][4]["metrics"]["success"] == 0.0
    assert steps[-1][4]["truncated_by"] == "env turn limit"


@ALL_LEVELS
def test_progress_is_paid_once_and_only_when_asked_for(level: int) -> None:
    for seed in range(20):
        plain, shaped = play(TextGame(level), "oracle", seed), play(TextGame(level, shaped=True), "oracle", seed)
        assert [step[0] for step in plain] == [step[0] for step in shaped]
        assert [step[1] for step in plain] == [0.0] * (len(plain) - 1) + [1.0]
        progress = [round(step[1], 6) for step in shaped[:-1]]
        is_progress = [step[0].startswith(("Taken.", "Opened.")) for step in shaped[:-1]]
        assert progress == [0.1 if done else 0.0 for done in is_progress]
        assert shaped[-1][1] == 1.0


def test_two_steps_of_progress_in_one_reply_are_both_paid() -> None:
    env = TextGame(3, shaped=True)
    for seed in range(200):
        env.reset(seed=seed)
        closed = env.play.closed[env.play.room]
        if closed and not closed[0].locked:
            calls = (
                ToolCall("1", "open", {"target": "box"}),
                ToolCall("2", "take", {"item": closed[0].content}),
                ToolCall("3", "take", {"item": closed[0].content}),
            )
            _, reward, *_ = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
            assert reward == pytest.approx(0.2)
            return
    pytest.fail("no first room had a box")


# ---- typed commands


def typed(call: ToolCall, short: bool) -> str:
    """What a person would type."""
    values = [str(value) for value in call.arguments.values()]
    if call.name == "go":
        return values[0][0] if short else f"go {values[0]}"
    return f"USE {values[0]} on {values[1]}." if call.name == "use" else f"{call.name} {' '.join(values)}"


@ALL_LEVELS
def test_typed_commands_do_what_calls_do(level: int) -> None:
    for seed in range(30):
        by_call, by_hand = TextGame(level), TextGame(level)
        observation, _ = by_call.reset(seed=seed)
        by_hand.reset(seed=seed)
        oracle, over = policy_for(by_call, "oracle"), False
        oracle.reset(by_call, observation, seed)
        while not over:
            message = oracle.act("")
            (call,) = message.tool_calls
            assert isinstance(call, ToolCall)
            called = by_call.step(Action.from_message(message))
            assert by_hand.step(typed(call, short=bool(seed % 2)))[:4] == called[:4]
            over = called[2] or called[3]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("n", ("go", {"direction": "north"})),
        ("West", ("go", {"direction": "west"})),
        ("walk s", ("go", {"direction": "south"})),
        ("get red key", ("take", {"item": "red key"})),
        ("pick up red key", ("take", {"item": "red key"})),
        ("unlock red key on red chest", ("use", {"item": "red key", "target": "red chest"})),
        ("  OPEN box. ", ("open", {"target": "box"})),
        ("l", ("look", {})),
    ],
)
def test_commands_have_short_and_long_forms(text: str, call: GameCall) -> None:
    (call_read,) = TextGame().parse_command(text)
    assert isinstance(call_read, ToolCall)
    assert (call_read.name, dict(call_read.arguments)) == call


@pytest.mark.parametrize("text", ["", " ", ".", "dance", "red key", "look around"])
def test_other_words_are_answered_with_the_commands(text: str) -> None:
    env = TextGame()
    env.reset(seed=0)
    observation, reward, terminated, *_ = env.step(text)
    assert "That is not a command. Commands: north, east, south, west, take ITEM" in observation
    assert (reward, terminated) == (0.0, False)


# ---- anything goes

WORDS = st.one_of(
    st.sampled_from(
        ["north", "east", "south", "west", "n", "red key", "blue key", "box", "red chest", "crown", "__init__"]
    ),
    st.text(max_size=12),
)
VALUES = st.one_of(WORDS, st.none(), st.integers(), st.booleans(), st.lists(WORDS, max_size=2))
CALLS = st.one_of(
    st.builds(
        ToolCall,
        st.text(max_size=5),
        st.one_of(st.sampled_from(["go", "take", "open", "use", "look"]), WORDS),
        st.dictionaries(st.one_of(st.sampled_from(["direction", "item", "target"]), WORDS), VALUES, max_size=3),
    ),
    st.builds(MalformedCall, st.text(max_size=5), st.text(max_size=12), st.just("not JSON")),
)
REPLIES = st.one_of(
    st.text(max_size=30),
    st.builds(" ".join, st.lists(WORDS, max_size=4)),
    st.lists(CALLS, max_size=4).map(
        lambda calls: Action.from_message(Message("assistant", "", tool_calls=tuple(calls)))
    ),
)


@pytest.mark.long
@settings(max_examples=200)
@given(level=st.sampled_from(sorted(LEVELS)), seed=st.integers(0, 2**31), replies=st.lists(REPLIES, max_size=12))
def test_no_reply_raises_or_gives_reward_beyond_one(level: int, seed: int, replies: list[str]) -> None:
    env = TextGame(level)
    env.reset(seed=seed)
    total = 0.0
    for reply in replies:
        observation, reward, terminated, truncated, info = env.step(reply)
        assert isinstance(observation, str)
        total += reward
        calls = reply.tool_calls if isinstance(reply, Action) else ()
        assert [result.call_id for result in info["tool_results"]][: len(calls)] == [call.id for call in calls]
        if terminated or truncated:
            break
    assert 0.0 <= total <= 1.0


@pytest.mark.parametrize("kwargs", [{}, {"level": 5, "shaped": True}])
@pytest.mark.slow
def test_it_passes_check_env(kwargs: dict[str, Any]) -> None:
    assert check_env("TextGame-v0", kwargs) == []
