"""Messages and tools go to chat completions and come back as they were."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.openai_wire import REASONING, WireError, message_from_openai, message_to_openai, tool_from_openai
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
        lambda content, reasoning, calls: Message("assistant", content, reasoning, tuple(calls)),
        texts,
        st.none() | texts,
        st.lists(calls, max_size=3),
    ),
)


@given(messages)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    wire_message = json.loads(json.dumps(message_to_openai(message)))
    assert message_from_openai(wire_message) == message


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
    (bad_call,) = message_from_openai({"role": "assistant", "content": None, "tool_calls": [call]}).tool_calls
    assert isinstance(bad_call, MalformedCall) and bad_call.id == "call_7" and "the arguments are" in bad_call.error
    assert json.loads(bad_call.raw) == {"name": "go", "arguments": arguments}


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_none(arguments: object) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
    assert message_from_openai({"role": "assistant", "tool_calls": [call]}).tool_calls == (ToolCall("a", "look", {}),)


@pytest.mark.parametrize("key", ["parameters", "args", "input", "direction"])
@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": "{}"}, {"arguments": '{"a": 1}'}])
def test_a_call_with_an_unknown_key_is_malformed_and_names_it(key: str, arguments: dict[str, Any]) -> None:
    function = {"name": "go", **arguments, key: {"direction": "north"}}
    (bad_call,) = message_from_openai(
        {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
    ).tool_calls
    assert isinstance(bad_call, MalformedCall) and f'no "{key}"' in bad_call.error
    assert json.loads(bad_call.raw) == function


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_arguments_outside_of_the_function_make_a_call_malformed(key: str) -> None:
    call = {"id": "a", "function": {"name": "go"}, key: {"direction": "north"}}
    (bad_call,) = message_from_openai({"role": "assistant", "tool_calls": [call]}).tool_calls
    assert isinstance(bad_call, MalformedCall) and f'no "{key}" outside of it' in bad_call.error


def test_what_servers_and_table_formats_add_to_a_call_is_no_argument() -> None:
    function = {"name": "go", "arguments": "{}", "index": 0, "parameters": None, "description": None}
    call = {"id": "a", "index": 0, "type": "function", "extra_content": {"google": {}}, "input": None}
    message = message_from_openai({"role": "assistant", "tool_calls": [{**call, "function": function}]})
    assert message.tool_calls == (ToolCall("a", "go", {}),)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"direction": {"type": "string"}}, "required": ["direction"]}


@pytest.mark.parametrize("key", ["parameters", "inputSchema", "input_schema"])
def test_a_tool_has_its_schema_in_the_form_of_openai_mcp_and_anthropic(key: str) -> None:
    spec = ToolSpec("go", "Walks.", SCHEMA)
    bare = {"name": "go", "description": "Walks.", key: SCHEMA}
    assert tool_from_openai(bare) == tool_from_openai({"type": "function", "function": bare}) == spec
    assert tool_from_openai({**dict.fromkeys(("parameters", "inputSchema", "input_schema")), **bare}) == spec
    assert tool_from_openai({"type": "function", "function": {"parameters": {}, **bare}}) == spec
    assert tool_from_openai({**bare, key: {}}).parameters == {"type": "object", "properties": {}}
    bedrock = {"name": "go", "description": "Walks.", "inputSchema": {"json": SCHEMA}}
    assert tool_from_openai({"toolSpec": bedrock}) == tool_from_openai(bedrock) == spec


@pytest.mark.parametrize("key", ["arguments", "args", "input", "schema", "properties"])
def test_a_tool_with_its_schema_under_another_key_is_refused_and_the_key_named(key: str) -> None:
    with pytest.raises(WireError, match=f"tool has its schema under '{key}'"):
        tool_from_openai({"type": "function", "function": {"name": "go", key: SCHEMA}})
    assert (
        tool_from_openai({"type": "function", "function": {"name": "go", "strict": True}}).parameters["properties"]
        == {}
    )


def test_text_parts_are_one_text_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert message_from_openai({"role": "developer", "content": parts}) == Message("system", "Be brief.")


@pytest.mark.parametrize(
    ("value", "problem"),
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
def test_what_is_no_message_is_named_with_its_place(value: object, problem: str) -> None:
    with pytest.raises(WireError) as caught:
        message_from_openai(value)
    assert problem in str(caught.value) and caught.value.param and caught.value.param.startswith("message")
    assert pickle.loads(pickle.dumps(caught.value)).param == caught.value.param


EMPTY: list[object] = [None, "", [], {}, False, " \n", [{"type": "text", "text": ""}]]


def reasoning_of(**fields: object) -> str | None:
    return message_from_openai({"role": "assistant", "content": "A", **fields}).reasoning


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize(
    "form",
    [
        "RS",
        ["R", "S"],
        {"content": "RS"},
        {"type": "thinking", "thinking": "RS", "signature": "x"},
        [{"type": "reasoning.text", "text": "R", "index": 0}, {"type": "reasoning.text", "text": "S", "index": 1}],
        [{"type": "reasoning.summary", "summary": "RS"}, {"type": "reasoning.encrypted", "data": "x"}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": "R"}, {"type": "text", "text": "S"}]}],
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "RS"}], "encrypted_content": "x"}],
    ],
    ids=json.dumps,
)
def test_reasoning_is_read_under_every_name_in_every_form(name: str, form: object) -> None:
    assert reasoning_of(**{name: form}) == "RS"
    for empty_name in REASONING:
        for empty in EMPTY:
            assert reasoning_of(**{empty_name: empty, name: form}) == "RS"
    for holder in ("additional_kwargs", "provider_specific_fields"):
        assert reasoning_of(reasoning_content=None, **{holder: {name: form}}) == "RS"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "R"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "R"}]},
        {"type": "reasoning", "text": "R"},
        {"thought": True, "text": "R"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "R"}]},
    ],
    ids=json.dumps,
)
def test_parts_of_a_content_that_are_reasoning_are_no_text_of_the_reply(part: object) -> None:
    content = [part, {"type": "text", "text": "A"}]
    assert message_from_openai({"role": "assistant", "content": content}) == Message("assistant", "A", "R")
    with pytest.raises(WireError, match=r"content\[0\] is a text part, got 'thinking'"):
        message_from_openai({"role": "user", "content": [{"type": "thinking", "thinking": "R"}]})


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "x"}], "reasoning_content": ""},
        {"reasoning": {"effort": "high"}},
        {"thinking": 3},
        {"thinking": json.loads("[" * 90 + "]" * 90)},
        {"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A"}]},
    ],
    ids=json.dumps,
)
def test_reasoning_without_a_text_is_refused_by_its_name(fields: dict[str, object]) -> None:
    with pytest.raises(WireError, match="holds no text of reasoning that can be read") as caught:
        reasoning_of(**fields)
    assert caught.value.param == f"message.{next(iter(fields))}"


def test_one_reasoning_under_two_names_is_read_once_and_two_are_refused() -> None:
    blocks = [{"type": "thinking", "thinking": text} for text in ("Two lines.", " Here.")]
    assert reasoning_of(reasoning_content="Two lines.\nHere.", thinking_blocks=blocks) == "Two lines.\nHere."
    with pytest.raises(WireError, match="message has different reasoning in reasoning and thinking: keep"):
        reasoning_of(reasoning="R", thinking="S")


@pytest.mark.parametrize("value", [None, {}, {"function": {}}, {"function": {"name": "x", "parameters": [1]}}])
def test_what_is_no_tool_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="tool"):
        tool_from_openai(value)


@pytest.mark.parametrize("key", ["json_schema", "args_schema", "inputSchema", "parametersJsonSchema"])
def test_a_tool_whose_schema_stands_elsewhere_is_refused_with_the_place(key: str) -> None:
    schema = {"type": "object", "properties": {"to": {"type": "string"}}}
    with pytest.raises(WireError, match=f"has its schema under '{key}'"):
        tool_from_openai({"type": "function", "function": {"name": "go"}, key: schema})


@pytest.mark.parametrize("key", ["function_call", "tool_call", "toolCalls"])
def test_calls_under_another_name_are_refused(key: str) -> None:
    with pytest.raises(WireError, match=f"{key} is not supported: use tool_calls"):
        message_from_openai({"role": "assistant", "content": "A", key: {"name": "go", "arguments": "{}"}})
