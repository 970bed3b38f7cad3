"""A reply means the same whole and in parts, and a request has one key however it is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import AgentGymError
from agentgym.openai_wire import REASONING, WireError
from agentgym.rollout.serving.wires.chat import ChatWire, read_message, wire_messages
from agentgym.rollout.serving.wires.messages import MessagesWire
from agentgym.rollout.serving.wires.response_store import ResponseStore
from agentgym.rollout.serving.wires.responses import ResponsesWire
from agentgym.rollout.serving.wires.wire import AgentReply, AgentRequest, AgentWire
from agentgym.types import MalformedCall, Message, ToolCall

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.lists(
    st.builds(lambda name, value: ToolCall("", name or "go", {"to": value}), texts, texts), max_size=3
).map(lambda calls: tuple(ToolCall(f"call_{index}", call.name, call.arguments) for index, call in enumerate(calls)))
replies = st.builds(
    lambda content, reasoning, calls, turn, finish: AgentReply(
        "train-1", turn, Message("assistant", content, reasoning or None, calls), finish, 12, 5, created=1_700_000_000
    ),
    texts,
    texts,
    calls,
    st.integers(0, 99),
    st.sampled_from(["stop", "length"]),
)
THOUGHT = [{"type": "thinking", "thinking": "R"}]
HELLO = {"role": "user", "content": "hello"}
BODIES: dict[type[AgentWire], dict[str, Any]] = {
    ChatWire: {"messages": [HELLO], "stream_options": {"include_usage": True}},
    ResponsesWire: {"input": [HELLO]},
    MessagesWire: {"messages": [HELLO], "max_tokens": 128_000},
}


def read(body: Any, wire: AgentWire | None = None) -> AgentRequest:
    return (wire or ChatWire()).read(body, ResponseStore())


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
def test_a_stream_spells_the_message_of_the_whole_reply(reply: AgentReply) -> None:
    request, wire = read(BODIES[ChatWire]), ChatWire()
    whole: Any = json.loads(json.dumps(wire.answer(request, [reply], ResponseStore())))
    *chunks, last, usage = json.loads(
        json.dumps([event for _, event in wire.events(request, [reply], ResponseStore())])
    )
    (choice,) = whole["choices"]
    spelled, message = joined(chunks), choice["message"]
    assert spelled["content"] == (message["content"] or "")
    assert spelled["reasoning_content"] == message.get("reasoning_content", "")
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    assert spelled["tool_calls"] == calls
    assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert usage["usage"] == whole["usage"] and whole["usage"]["total_tokens"] == 17


@pytest.mark.parametrize("kind", BODIES)
@given(reply=replies)
def test_a_reply_that_comes_back_is_the_message_that_was_parsed(kind: type[AgentWire], reply: AgentReply) -> None:
    wire, stored = kind(), ResponseStore()
    request = read(BODIES[kind], wire)
    answer: Any = json.loads(json.dumps(wire.answer(request, [reply], stored), default=dict))
    if kind is ChatWire:
        body = {"messages": [HELLO, answer["choices"][0]["message"]]}
    elif kind is MessagesWire:
        body = {"messages": [HELLO, {"role": "assistant", "content": answer["content"]}]}
    else:
        body = {"input": [HELLO, *answer["output"]]}
        assert stored.items(answer["id"]) == (HELLO, *answer["output"])
    back = read(body, wire)
    assert back.messages[1] == reply.message
    is_named = bool(reply.message.tool_calls) or kind is ResponsesWire
    is_named = is_named or (kind is MessagesWire and bool(reply.message.reasoning))
    assert back.turns == ("", reply.name if is_named else "")


def test_call_ids_on_the_wire_name_the_turn_and_come_back_without_it() -> None:
    answer = Message("tool", "done", tool_call_id="call_1")
    (wire_message,) = wire_messages([answer], 12)
    assert wire_message["tool_call_id"] == "turn12_call_1" and read_message(wire_message) == answer


def test_a_request_has_one_key_however_it_is_sent() -> None:
    plain = read({"messages": [HELLO]})
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"}]
    same = ({"stream": True}, {"model": "other", "temperature": 0.5}, {"messages": parts}, {"tools": None, "n": 1})
    assert {read({"messages": [HELLO], **fields}).key for fields in same} == {plain.key}
    assert read({"messages": parts}, MessagesWire()).key == read({"input": parts}, ResponsesWire()).key == plain.key
    others = ({"max_tokens": 5}, {"messages": [HELLO, HELLO]}, {"tools": [{"function": {"name": "go"}}]})
    assert len({plain.key, *(read({"messages": [HELLO], **fields}).key for fields in others)}) == 4


def test_settings_of_the_distribution_are_noted_and_those_without_meaning_are_not() -> None:
    request = read({"messages": [HELLO], "temperature": 0.0, "seed": 3, "user": "x", "metadata": {}})
    assert request.notes.decided == ("seed", "temperature")


@pytest.mark.parametrize("wire", [ChatWire(), ResponsesWire(), MessagesWire()])
@pytest.mark.parametrize(
    "body",
    [{}, {"messages": HELLO}, {"messages": [HELLO], "input": [HELLO], "tools": {}}, {"messages": [], "input": []}],
)
def test_a_body_that_asks_for_nothing_is_refused(wire: AgentWire, body: object) -> None:
    with pytest.raises(WireError):
        read(body, wire)


@pytest.mark.parametrize("name", REASONING)
def test_a_request_has_one_key_under_whichever_name_it_sends_reasoning(name: str) -> None:
    def request(**fields: object) -> AgentRequest:
        return read({"messages": [HELLO, {"role": "assistant", "content": "A", **fields}, HELLO]})

    assert request(**{name: THOUGHT}).messages[1].reasoning == "R"
    assert request(**{name: THOUGHT}).key == request(reasoning_content="R").key != request().key
    with pytest.raises(WireError) as caught:
        request(**{name: [{"type": "redacted_thinking", "data": "x"}]})
    assert caught.value.param == f"messages[1].{name}"


@pytest.mark.parametrize("fields", [{"tool_choice": {"type": "function", "function": {"name": "nowhere"}}}, {"n": 65}])
def test_what_cannot_be_held_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    with pytest.raises(AgentGymError) as caught:
        read({"messages": [HELLO], **fields})
    assert getattr(caught.value, "param", None) in fields


def test_custom_tools_and_their_calls_are_tools_with_one_input() -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
    call = {"id": "turn2_call_0", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    result = {"role": "tool", "tool_call_id": "turn2_call_0", "content": "ok"}
    request = read({"messages": [HELLO, {"role": "assistant", "tool_calls": [call]}, result], "tools": [tool]})
    assert request.messages[1].tool_calls == (ToolCall("call_0", "patch", {"input": "a\nb"}),)
    assert request.tools[0].parameters["required"] == ["input"]
    reply = AgentReply("x", 2, request.messages[1], "stop", 1, 1, 0)
    answer: Any = ChatWire().answer(request, [reply], ResponseStore())
    assert answer["choices"][0]["message"]["tool_calls"] == [call]


def test_a_malformed_call_that_comes_back_stays_one() -> None:
    call = {"id": "turn2_call_0", "type": "function", "function": {"name": "go", "arguments": '{"to": '}}
    (parsed,) = read({"messages": [HELLO, {"role": "assistant", "tool_calls": [call]}]}).messages[1].tool_calls
    assert isinstance(parsed, MalformedCall) and '{\\"to\\": ' in parsed.raw
