"""A reply means the same whole and in parts, and a request has one key however it is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.openai_wire import REASONING, WireError
from agentgym.rollout.serving.chat_completion import (
    ChatCompletion,
    ChatRequest,
    chunks_to_openai,
    read_chat_request,
    read_message,
    reply_to_openai,
    wire_answer,
)
from agentgym.types import MalformedCall, Message, ToolCall

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.lists(
    st.builds(lambda name, value: ToolCall("", name or "go", {"to": value}), texts, texts)
    | st.builds(lambda raw: MalformedCall("", raw, "the call could not be read"), texts),
    max_size=3,
).map(lambda calls: tuple(_numbered(call, index) for index, call in enumerate(calls)))
replies = st.builds(
    lambda content, reasoning, calls, turn, finish: ChatCompletion(
        "chatcmpl-1", turn, Message("assistant", content, reasoning, calls), finish, 12, 5, created=1_700_000_000
    ),
    texts,
    st.none() | texts,
    calls,
    st.integers(0, 99),
    st.sampled_from(["stop", "length"]),
)
THOUGHT = [{"type": "thinking", "thinking": "R"}]
HELLO = {"role": "user", "content": "hello"}


def _numbered(call: ToolCall | MalformedCall, index: int) -> ToolCall | MalformedCall:
    if isinstance(call, MalformedCall):
        return MalformedCall(f"call_{index}", call.raw, call.error)
    return ToolCall(f"call_{index}", call.name, call.arguments)


def joined(chunks: list[Any]) -> Any:
    """The message that the chunks of a stream spell."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({**part, "function": {**part["function"], "arguments": ""}})
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


@given(replies)
def test_a_stream_spells_the_message_of_the_whole_reply(reply: ChatCompletion) -> None:
    whole: Any = json.loads(json.dumps(reply_to_openai(reply, "policy")))
    *chunks, last, usage = json.loads(json.dumps(list(chunks_to_openai(reply, "policy", include_usage=True))))
    (choice,) = whole["choices"]
    spelled, message = joined(chunks), choice["message"]
    assert spelled["content"] == (message["content"] or "")
    assert spelled["reasoning_content"] == message.get("reasoning_content", "")
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    assert spelled["tool_calls"] == calls
    assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert usage["usage"] == whole["usage"] and whole["usage"]["total_tokens"] == 17


@given(replies)
def test_a_reply_that_is_sent_back_is_the_message_that_was_parsed(reply: ChatCompletion) -> None:
    (wire_message,) = wire_answer([reply.message], reply.turn)
    assert read_message(json.loads(json.dumps(wire_message))) == reply.message


def test_call_ids_on_the_wire_name_the_turn_and_come_back_without_it() -> None:
    answer = Message("tool", "done", tool_call_id="call_1")
    (wire_message,) = wire_answer([answer], 12)
    assert wire_message["tool_call_id"] == "turn12_call_1" and read_message(wire_message) == answer


def test_a_request_has_one_key_however_it_is_sent() -> None:
    plain = read_chat_request({"messages": [HELLO]})
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"}]
    same = ({"stream": True}, {"model": "other", "temperature": 0.5}, {"messages": parts}, {"tools": None, "n": 1})
    assert {read_chat_request({"messages": [HELLO], **fields}).key for fields in same} == {plain.key}
    others = ({"max_tokens": 5}, {"messages": [HELLO, HELLO]}, {"tools": [{"function": {"name": "go"}}]})
    assert len({plain.key, *(read_chat_request({"messages": [HELLO], **fields}).key for fields in others)}) == 4


def test_settings_of_the_distribution_are_noted_and_those_without_meaning_are_not() -> None:
    request = read_chat_request({"messages": [HELLO], "temperature": 0.0, "seed": 3, "user": "x", "metadata": {}})
    assert request.decided == ("seed", "temperature")


@pytest.mark.parametrize("body", [None, [], "hello", {}, {"messages": HELLO}, {"messages": [HELLO], "tools": {}}])
def test_a_body_that_asks_for_nothing_is_refused(body: object) -> None:
    with pytest.raises(WireError):
        read_chat_request(body)


@pytest.mark.parametrize("name", REASONING)
def test_a_request_has_one_key_under_whichever_name_it_sends_reasoning(name: str) -> None:
    def request(**fields: object) -> ChatRequest:
        return read_chat_request({"messages": [HELLO, {"role": "assistant", "content": "A", **fields}, HELLO]})

    assert request(**{name: THOUGHT}).messages[1].reasoning == "R"
    assert request(**{name: THOUGHT}).key == request(reasoning_content="R").key != request().key
    with pytest.raises(WireError) as caught:
        request(**{name: [{"type": "redacted_thinking", "data": "x"}]})
    assert caught.value.param == f"messages[1].{name}"
