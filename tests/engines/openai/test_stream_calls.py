"""Parallel calls stay apart, however a server numbers the parts of its stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentgym.engines.openai.reply import ChatCompletionReader
from agentgym.types import MalformedCall, ToolCall

EXPECTED_CALLS = [("go", {"to": "Oslo"}), ("look", {"at": {"x": 1}})]


def part(index: int | None, call_id: str = "", name: str = "", arguments: object = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value not in ("", None)}
    place = {} if index is None else {"index": index}
    return {**place, **({"id": call_id, "type": "function"} if call_id else {}), "function": function}


def whole(index: int | None, number: int, call_id: str = "") -> dict[str, Any]:
    name, arguments = EXPECTED_CALLS[number]
    return part(index, call_id, name, json.dumps(arguments))


def pieces(index: int | None, number: int, call_id: str = "", later_id: str = "", later_name: bool = False) -> Any:
    name, arguments = EXPECTED_CALLS[number]
    text = json.dumps(arguments)
    later = [part(index, later_id, name if later_name else "", character) for character in text]
    return [[part(index, call_id, name, "")], *[[piece] for piece in later]]


def read(events: list[list[dict[str, Any]]], key: str = "delta") -> Any:
    reader = ChatCompletionReader()
    for parts in events:
        reader.take({"choices": [{"index": 0, key: {"tool_calls": parts}}]})
    reader.take({"choices": [{"index": 0, key: {}, "finish_reason": "tool_calls"}]})
    return reader.finish().message.tool_calls


A, B = "call_a", "call_b"
FORMS: dict[str, list[list[dict[str, Any]]]] = {
    "as OpenAI numbers them": [*pieces(0, 0, A), *pieces(1, 1, B)],
    "numbered from 1": [*pieces(1, 0, A), *pieces(2, 1, B)],
    "index 0, two events": [[whole(0, 0, A)], [whole(0, 1, B)]],
    "index 0, one event": [[whole(0, 0, A), whole(0, 1, B)]],
    "index 0, in pieces": [*pieces(0, 0, A), *pieces(0, 1, B)],
    "index 0, pieces that repeat the id": [*pieces(0, 0, A, A), *pieces(0, 1, B, B)],
    "index 0, pieces that repeat id and name": [*pieces(0, 0, A, A, True), *pieces(0, 1, B, B, True)],
    "index 0, interleaved by id": [
        [whole(0, 0, A) | {"function": {"name": "go"}}, whole(0, 1, B) | {"function": {"name": "look"}}],
        [part(0, A, "", '{"to": "Os'), part(0, B, "", '{"at": ')],
        [part(0, A, "", 'lo"}'), part(0, B, "", '{"x": 1}}')],
    ],
    "index 0, no ids": [[whole(0, 0)], [whole(0, 1)]],
    "index 0, no ids, one event": [[whole(0, 0), whole(0, 1)]],
    "index 0, no ids, in pieces": [*pieces(0, 0), *pieces(0, 1)],
    "index 0, equal ids": [[whole(0, 0, A)], [whole(0, 1, A)]],
    "no index, two events": [[whole(None, 0, A)], [whole(None, 1, B)]],
    "no index, one event": [[whole(None, 0, A), whole(None, 1, B)]],
    "no index, in pieces": [*pieces(None, 0, A), *pieces(None, 1, B)],
    "no index, a new id in each piece": [*pieces(None, 0, A, "x"), *pieces(None, 1, B, "y")],
    "no index, no ids": [[whole(None, 0)], [whole(None, 1)]],
    "the second index first": [[whole(1, 1, B)], [whole(0, 0, A)]],
    "arguments as objects": [[part(0, A, "go", EXPECTED_CALLS[0][1])], [part(0, B, "look", EXPECTED_CALLS[1][1])]],
}


@pytest.mark.parametrize("form", FORMS)
def test_two_calls_of_a_stream_are_two_calls(form: str) -> None:
    calls = read(FORMS[form])
    assert [(call.name, call.arguments) for call in calls] == EXPECTED_CALLS
    if "ids" not in form:
        assert [call.id for call in calls] == [A, B]


@pytest.mark.parametrize("ids", [("", ""), (A, B)])
@pytest.mark.parametrize("index", [0, None])
def test_two_calls_of_the_same_function_are_two_calls(index: int | None, ids: tuple[str, str]) -> None:
    roll = [part(index, call_id, "roll", '{"sides": 6}') for call_id in ids]
    for events in ([roll], [[roll[0]], [roll[1]]]):
        assert [call.arguments for call in read(events)] == [{"sides": 6}] * 2
    if ids[0]:
        bare = [part(index, call_id, "look", "") for call_id in ids]
        assert [call.name for call in read([bare])] == ["look"] * 2


@pytest.mark.parametrize("indices", [(0, 1), (0, 0), (1, 0), (None, None), (5, 5)])
def test_an_answer_at_once_has_its_calls_in_their_order_whatever_the_index(indices: tuple[Any, Any]) -> None:
    calls = read([[whole(indices[0], 0, A), whole(indices[1], 1, B)]], key="message")
    assert [(call.id, call.name, call.arguments) for call in calls] == [
        (A, *EXPECTED_CALLS[0]),
        (B, *EXPECTED_CALLS[1]),
    ]


def test_what_a_model_adds_to_its_arguments_stays_its_mistake() -> None:
    for extra in ("}", ' {"to": "Bergen"}'):
        (call,) = read([[part(0, A, "go", '{"to": "Oslo"}')], [part(0, "", "", extra)]])
        assert isinstance(call, MalformedCall) and call.id == A


@pytest.mark.parametrize("key", ["delta", "message"])
@pytest.mark.parametrize("name", ["parameters", "args", "input"])
def test_a_call_with_its_arguments_under_another_key_is_malformed_and_names_it(key: str, name: str) -> None:
    (call,) = read([[{"id": A, "index": 0, "function": {"name": "go", name: {"to": "Oslo"}}}]], key)
    assert isinstance(call, MalformedCall) and f'no "{name}"' in call.error
    labeled = {"name": "go", "arguments": None, "index": 0, "provider_specific_fields": {"x": 1}, "parameters": None}
    assert read([[{"id": A, "index": 0, "function": labeled}]], key) == (ToolCall(A, "go", {}),)
    for value in (json.loads("[]"), False, 0):
        (call,) = read([[{"id": A, "index": 0, "function": {"name": "go", "arguments": value}}]], key)
        assert isinstance(call, MalformedCall)


@pytest.mark.parametrize("key", ["delta", "message"])
@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "go"}, "arguments": {"to": "Oslo"}},
        {"function": {"name": "go"}, "payload": {"to": "Oslo"}},
        {"name": "go", "arguments": {"to": "Oslo"}},
        {"type": "custom", "custom": {"name": "go", "input": "Oslo"}},
    ],
)
def test_a_call_with_its_arguments_outside_of_its_function_is_malformed(key: str, call: dict[str, Any]) -> None:
    (bad_call,) = read([[{"id": A, "index": 0, **call}]], key)
    assert isinstance(bad_call, MalformedCall) and bad_call.id == A


def test_other_choices_of_an_answer_and_empty_deltas_take_nothing_from_the_reply() -> None:
    reader = ChatCompletionReader()
    for index in (0, 1):
        reader.take({"choices": [{"index": index, "delta": {"content": f"{index}"}}]})
    reader.take({"choices": [{"index": 0, "delta": {}, "message": {"content": ["!"]}, "finish_reason": "stop"}]})
    assert reader.finish().message.content == "0!"


@pytest.mark.parametrize("key", ["delta", "message"])
@pytest.mark.parametrize("finish", ["function_call", "stop"])
def test_the_older_function_call_is_a_call(key: str, finish: str) -> None:
    text = '{"to": "Oslo"}'
    split = [{"name": "go", "arguments": ""}, *({"arguments": character} for character in text)]
    reader = ChatCompletionReader()
    for function in split if key == "delta" else [{"name": "go", "arguments": text}]:
        reader.take({"choices": [{key: {"content": None, "function_call": function}}]})
    reader.take({"choices": [{key: {"function_call": None}, "finish_reason": finish}]})
    assert reader.finish().message.tool_calls == (ToolCall("call_0", "go", {"to": "Oslo"}),)


def test_an_empty_function_call_and_one_beside_its_tool_calls_add_nothing() -> None:
    for older in ({"name": "", "arguments": ""}, {"name": "go", "arguments": '{"to": "Oslo"}'}, None):
        reader = ChatCompletionReader()
        message = {"tool_calls": [whole(0, 0, A)], "function_call": older}
        reader.take({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
        assert len(reader.finish().message.tool_calls) == 1
    reader.take({"choices": [{"message": {"content": "Hi.", "function_call": {"name": ""}}, "finish_reason": "stop"}]})
