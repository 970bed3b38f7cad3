"""The words of a conversation refuse what no conversation holds."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.types import MalformedCall, Message, Role, Task, ToolCall, ToolSpec

ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
CALL = ToolCall("call_0", "go", {"direction": "north"})
BROKEN = MalformedCall("call_1", '{"name": ', "not JSON")


@pytest.mark.parametrize("role", ROLES)
def test_a_message_has_one_of_four_roles(role: Role) -> None:
    assert Message(role, "text").role == role
    with pytest.raises(ConfigError, match="'narrator' is not one of system, user, assistant, tool"):
        Message(cast(Role, "narrator"), "text")


@pytest.mark.parametrize("role", ROLES)
def test_only_the_assistant_calls_tools(role: Role) -> None:
    if role == "assistant":
        assert Message(role, "", tool_calls=(CALL, BROKEN)).tool_calls == (CALL, BROKEN)
    else:
        with pytest.raises(ConfigError, match=f"a {role} message cannot hold tool calls"):
            Message(role, "", tool_calls=(CALL,))


@pytest.mark.parametrize("role", ROLES)
def test_only_a_tool_message_answers_a_call(role: Role) -> None:
    if role == "tool":
        assert Message(role, "done", tool_call_id="call_0").tool_call_id == "call_0"
    else:
        with pytest.raises(ConfigError, match=f"a {role} message cannot answer a tool call"):
            Message(role, "done", tool_call_id="call_0")


def test_messages_and_calls_are_frozen() -> None:
    for value, name in ((Message("user", "hi"), "content"), (CALL, "name"), (BROKEN, "raw")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, "other")


@given(content=st.text(), reasoning=st.none() | st.text())
def test_a_message_keeps_any_text_and_pickles(content: str, reasoning: str | None) -> None:
    message = Message("assistant", content, reasoning, (CALL, BROKEN))
    assert pickle.loads(pickle.dumps(message)) == message
    assert (message.content, message.reasoning) == (content, reasoning)


def test_a_tool_spec_takes_the_form_endpoints_want() -> None:
    parameters = {"type": "object", "properties": {"direction": {"enum": ["north", "south"]}}}
    spec = ToolSpec("go", "Walk.", parameters)
    assert spec.to_openai() == {
        "type": "function",
        "function": {"name": "go", "description": "Walk.", "parameters": parameters},
    }
    assert json.loads(json.dumps(spec.to_openai())) == spec.to_openai()


values = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=3)
tasks = st.builds(Task, st.sampled_from(["TextGame-v0", "Shop-v1"]), st.integers(0, 3), values, values)


@given(left=tasks, right=tasks)
def test_different_keys_mean_different_tasks(left: Task, right: Task) -> None:
    if left.key != right.key:
        assert left != right


@given(task=tasks)
def test_a_task_key_ignores_the_order_of_its_keywords(task: Task) -> None:
    backwards: dict[str, Any] = dict(reversed(task.kwargs.items()))
    assert Task(task.env_id, task.seed, task.options, backwards).key == task.key


def test_options_and_keywords_of_the_same_text_make_different_keys() -> None:
    level = {"level": 1}
    keys = {Task("G-v0", 7).key, Task("G-v0", 7, options=level).key, Task("G-v0", 7, kwargs=level).key}
    assert keys == {"G-v0/7", 'G-v0/7{"level": 1}', 'G-v0{"level": 1}/7'}
