"""A prompt is rendered once for a group, and never taken for another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentgym.rollout.episode.known_prompts import MOST, KnownPrompts
from agentgym.types import Message, ToolCall, ToolSpec

TOOL = ToolSpec("look", "Looks around.", {"type": "object", "properties": {}})
START = [Message("system", "You play."), Message("user", "You are in a hall.")]


@pytest.fixture
def prompts() -> KnownPrompts:
    prompts = KnownPrompts()
    prompts.keep(START, (TOOL,), [1, 2, 3])
    return prompts


def test_equal_messages_with_the_same_tools_are_known(prompts: KnownPrompts) -> None:
    ids = prompts.find([replace(message) for message in START], [TOOL])
    assert ids == [1, 2, 3]
    assert ids is not prompts.find(START, (TOOL,)), "each row has a list of its own"


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (START[:1], (TOOL,)),
        ([START[0], Message("user", "You are in a cave.")], (TOOL,)),
        ([START[0], replace(START[1], role="system")], (TOOL,)),
        (START, ()),
        (START, (TOOL, TOOL)),
        (START, (replace(TOOL),)),
    ],
)
def test_another_message_or_tool_is_another_prompt(
    messages: list[Message], tools: tuple[ToolSpec, ...], prompts: KnownPrompts
) -> None:
    assert prompts.find(messages, tools) is None


def test_arguments_that_python_takes_for_equal_are_not_kept(prompts: KnownPrompts) -> None:
    called, equal = ([*START, Message("assistant", "", tool_calls=(ToolCall("a", "go", {"n": n}),))] for n in (1, True))
    assert called == equal
    prompts.keep(called, (TOOL,), [4])
    assert prompts.find(equal, (TOOL,)) is None
    assert prompts.find(called, (TOOL,)) is None


def test_the_oldest_are_forgotten(prompts: KnownPrompts) -> None:
    for number in range(MOST):
        prompts.keep([Message("user", str(number))], (), [number])
    assert prompts.find(START, (TOOL,)) is None
    assert all(prompts.find([Message("user", str(number))], ()) == [number] for number in range(MOST))
