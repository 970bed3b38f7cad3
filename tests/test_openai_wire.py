"""Messages and tools go to chat completions and come back as they were."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.openai_wire import WireError, message_from_openai, message_to_openai, tool_from_openai
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

texts = st.text(st.characters(exclude_categories=["Cs"]))
names = texts.filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, names, names, st.dictionaries(texts, values, max_size=3)) | st.builds(
    MalformedCall, names, texts, texts
)
messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "user"]), texts),
    st.builds(lambda content, call_id: Message("tool", content, tool_call_id=call_id), texts, names),
    st.builds(
        lambda content, reasoning, made: Message("assistant", content, reasoning, tuple(made)),
        texts,
        st.none() | texts,
        st.lists(calls, max_size=3),
    ),
)


@given(messages)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    sent = json.loads(json.dumps(message_to_openai(message)))
    assert message_from_openai(sent) == message


@given(messages)
def test_every_server_can_read_the_arguments_of_every_call(message: Message) -> None:
    for call in message_to_openai(message).get("tool_calls", ()):  # type: ignore[union-attr]
        assert isinstance(json.loads(call["function"]["arguments"]), dict)  # type: ignore[index,call-overload,arg-type]


@given(names, texts, st.dictionaries(texts, values, max_size=3))
def test_a_tool_comes_back_as_it_was(name: str, description: str, properties: dict[str, Any]) -> None:
    spec = ToolSpec(name, description, {"type": "object", "properties": properties})
    assert tool_from_openai(json.loads(json.dumps(spec.to_openai()))) == spec


@pytest.mark.parametrize("arguments", ['{"direction": ', "[1]", "3", '{"n": NaN}', '{"s": "\\ud800"}', "[" * 5000])
def test_arguments_that_are_no_object_make_a_malformed_call_with_the_text_kept(arguments: str) -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "go", "arguments": arguments}}
    (read,) = message_from_openai({"role": "assistant", "content": None, "tool_calls": [call]}).tool_calls
    assert isinstance(read, MalformedCall) and read.id == "call_7" and "the arguments are" in read.error
    assert json.loads(read.raw) == {"name": "go", "arguments": arguments}


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_none(arguments: object) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
    assert message_from_openai({"role": "assistant", "tool_calls": [call]}).tool_calls == (ToolCall("a", "look", {}),)


def test_text_parts_are_one_text_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert message_from_openai({"role": "developer", "content": parts}) == Message("system", "Be brief.")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("hello", "an object with a role"),
        ({"content": "x"}, "role is one of system, developer, user"),
        ({"role": "robot", "content": "x"}, "got 'robot'"),
        ({"role": "user", "content": 3}, "message.content is a list, got int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text is supported"),
        ({"role": "tool", "content": "x"}, "names the call that is answered"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "only an assistant message calls tools"),
        ({"role": "assistant", "tool_calls": [3]}, "message.tool_calls[0] is"),
        ({"role": "assistant", "function_call": {}}, "use tool_calls"),
    ],
)
def test_what_is_no_message_is_named_with_its_place(value: object, told: str) -> None:
    with pytest.raises(WireError) as caught:
        message_from_openai(value)
    assert told in str(caught.value) and caught.value.param and caught.value.param.startswith("message")
    assert pickle.loads(pickle.dumps(caught.value)).param == caught.value.param


@pytest.mark.parametrize("value", [None, {}, {"function": {}}, {"function": {"name": "x", "parameters": [1]}}])
def test_what_is_no_tool_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="tool"):
        tool_from_openai(value)
