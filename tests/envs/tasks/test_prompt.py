"""Prompt-v0: a row's messages as they are, one reply, and sums where no row is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs import EVAL_SEED_START, Action, EpisodeOver, TextEnv, make_env, policy_for
from agentgym.errors import ConfigError
from agentgym.openai_wire import WireError
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.testing import check_env
from agentgym.trajectory import Status
from agentgym.types import Message, Task, ToolCall

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SHOTS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Paris is the capital of?"},
]


@pytest.fixture
def env() -> TextEnv:
    return make_env("Prompt-v0")


def score(env: TextEnv, reply: str, **options: Any) -> tuple[float, dict[str, float]]:
    env.reset(seed=0, options={"messages": SHOTS, **options})
    _, reward, terminated, truncated, info = env.step(Action.from_message(Message("assistant", reply)))
    assert terminated and not truncated
    return reward, info["metrics"]


@pytest.mark.long
def test_it_keeps_the_contract_of_environments() -> None:
    assert check_env("Prompt-v0") == []


def test_a_rows_messages_are_shown_as_they_are(env: TextEnv) -> None:
    observation, info = env.reset(seed=0, options={"messages": SHOTS})
    assert info["messages"] == tuple(Message(shot["role"], shot["content"]) for shot in SHOTS)
    assert observation == "Be brief.\n1 + 1?\n2\nParis is the capital of?"
    assert env.system_prompt == "" and env.tool_specs == ()


def test_calls_among_the_messages_are_calls(env: TextEnv) -> None:
    messages = [
        SHOTS[1],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    _, info = env.reset(options={"messages": messages})
    assert info["messages"][1] == Message("assistant", "", tool_calls=(ToolCall("c", "add", {"a": 1}),))
    assert info["messages"][2] == Message("tool", "2", tool_call_id="c")


@pytest.mark.parametrize(
    ("truth", "reply", "reward"),
    [
        ("France", "France", 1.0),
        ("France", " \n fRANCE ", 1.0),
        ("the Republic  of France", "The republic of\tFrance", 1.0),
        ("１２", "12", 1.0),
        (12, "12", 1.0),
        (True, "true", 1.0),
        (["France", "Gaul"], "gaul", 1.0),
        ("France", "France, I think", 0.0),
        ("France", "", 0.0),
        ("", "", 0.0),
        (" ", "", 0.0),
        ([], "[]", 0.0),
        ({"answer": "France"}, "France", 0.0),
    ],
)
def test_a_reply_is_right_when_it_contains_the_ground_truth(
    env: TextEnv, truth: Any, reply: str, reward: float
) -> None:
    assert score(env, reply, ground_truth=truth) == (reward, {"exact_match": reward})


def test_a_row_without_a_ground_truth_earns_nothing_and_has_no_match(env: TextEnv) -> None:
    assert score(env, "None") == (0.0, {})


def test_a_typed_reply_and_the_models_are_scored_alike(env: TextEnv) -> None:
    for reply in ("France", Action.from_message(Message("assistant", "France", reasoning="Spain? No."))):
        env.reset(options={"messages": SHOTS, "ground_truth": "France"})
        assert env.step(reply)[1] == 1.0
    with pytest.raises(EpisodeOver):
        env.step("France")


@pytest.mark.parametrize("messages", [None, [], "What?", {"role": "user", "content": "What?"}])
def test_options_without_messages_are_refused(env: TextEnv, messages: Any) -> None:
    with pytest.raises(ConfigError, match=r"options\['messages'\] is a list of at least one message"):
        env.reset(options={"messages": messages, "ground_truth": "a"})
    with pytest.raises(WireError, match=r"messages\[0\]\.role"):
        env.reset(options={"messages": [{"role": "human", "content": "a"}]})


def play(kind: str, seed: int, env: TextEnv, options: dict[str, Any] | None = None) -> Any:
    observation, info = env.reset(seed=seed, options=options)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed)
    return observation, info, *env.step(Action.from_message(policy.act(observation)))


def test_without_a_row_the_seed_draws_a_sum(env: TextEnv) -> None:
    seeds = [*range(300), *range(EVAL_SEED_START, EVAL_SEED_START + 20)]
    for seed in seeds:
        question, _, _, reward, *_, info = play("oracle", seed, env)
        first, sign, second = question.removeprefix("What is ").partition("?")[0].split()
        assert env.ground_truth == str(  # type: ignore[attr-defined]
            {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(first), int(second))
        )
        assert reward == info["metrics"]["success"] == 1.0
        _, _, _, reward, *_, info = play("cheat", seed, env)
        assert reward == info["metrics"]["success"] == 0.0
    assert len({env.reset(seed=seed)[0] for seed in range(3000)}) > 1500
    assert json.dumps(play("random", 5, env), default=asdict) == json.dumps(play("random", 5, env), default=asdict)


def test_the_oracle_of_a_row_replies_with_the_ground_truth(env: TextEnv) -> None:
    for truth in ("France", ["France", "Gaul"], 12):
        assert play("oracle", 0, env, {"messages": SHOTS, "ground_truth": truth})[3] == 1.0
    with pytest.raises(ConfigError, match="no ground truth that a reply could equal"):
        play("oracle", 0, env, {"messages": SHOTS})
    play("oracle", 0, env)


def test_a_row_is_rolled_out_with_its_system_prompt_and_examples(env: TextEnv, tokenizer_folder: Path) -> None:
    renderer = renderer_for(tokenizer_folder)

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        return reply_ids(renderer, Message("assistant", "France"))

    task = Task("Prompt-v0", 7, {"messages": SHOTS, "ground_truth": "France", "data_source": "geography"})
    loop = RolloutLoop(ScriptedEngine(reply), renderer, Limits())
    trajectory = asyncio.run(loop.run(env, Episode(task)))
    (row,) = trajectory.rows
    assert row.messages == tuple(Message(shot["role"], shot["content"]) for shot in SHOTS)
    prompt = renderer.decode(row.spans[0].ids)
    assert all(shot["content"] in prompt for shot in SHOTS)
    assert (trajectory.status, trajectory.reward, trajectory.success) == (Status.COMPLETED, 1.0, True)
    assert trajectory.task == task
