"""Kimi K3's elements become reasoning, content and calls."""

from __future__ import annotations

import pytest

from agentgym.chat_templates.formats.kimi_k3 import KIMI_K3
from agentgym.types import MalformedCall, Message, ToolCall


def element(name: str, inside: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{inside}<|close|>{name}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return element("argument", value, f' key="{key}" type="{kind}"')


def call(name: str, inside: str, index: int = 1) -> str:
    return element("call", inside, f' tool="{name}" index="{index}"')


GO = call("go", argument("to", "string", "north & <é>") + argument("n", "number", "2"))
ARGUMENTS = {"to": "north & <é>", "n": 2}
TAIL = "<|close|>message<|sep|><|end_of_msg|>"


def test_a_reply_holds_reasoning_content_and_several_calls() -> None:
    tools = element("tools", GO + call("look", "", 2))
    text = element("think", "Hm.") + element("response", "I go.") + tools + TAIL
    calls = (ToolCall("call_0", "go", ARGUMENTS), ToolCall("call_1", "look", {}))
    assert KIMI_K3.parse(text) == Message("assistant", "I go.", "Hm.", calls)


@pytest.mark.parametrize("in_reasoning", [True, False])
def test_a_reply_may_begin_inside_what_the_prompt_opened(in_reasoning: bool) -> None:
    name = "think" if in_reasoning else "response"
    message = KIMI_K3.parse(f"Or {GO}?<|close|>{name}<|sep|>{GO}{TAIL}", in_reasoning=in_reasoning)
    assert len(message.tool_calls) == (1 if in_reasoning else 2)
    assert message.reasoning == (f"Or {GO}?" if in_reasoning else None)


def test_arguments_are_read_by_their_own_types() -> None:
    kinds = [("boolean", "true", True), ("null", "null", None), ("array", "[1]", [1]), ("object", '{"a": 1}', {"a": 1})]
    inside = "".join(argument(kind, kind, text) for kind, text, _ in kinds) + argument("s", "string", "true")
    message = KIMI_K3.parse(call("a &quot;b&quot; &amp;amp;", inside))
    expected = {**{kind: value for kind, _, value in kinds}, "s": "true"}
    assert message.tool_calls == (ToolCall("call_0", 'a "b" &amp;', expected),)


def test_arguments_may_be_one_json_object() -> None:
    text = call("go", element("json", '{"to": "north"}', ' type="object"'))
    assert KIMI_K3.parse(text).tool_calls == (ToolCall("call_0", "go", {"to": "north"}),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call("go", argument("n", "number", "two")), "invalid JSON"),
        (call("", ""), "name"),
        (call("go", "to north"), "expected an argument"),
        (call("go", "<|open|>argument<|sep|>1<|close|>argument<|sep|>"), "needs a key"),
        (call("go", element("json", "[1]")), "got a list"),
        ('<|open|>call tool="go"<|close|>call<|sep|>', "behind the tool's name"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_with_its_reason(text: str, reason: str) -> None:
    bad, good = KIMI_K3.parse(element("tools", text + GO)).tool_calls
    assert good == ToolCall("call_1", "go", ARGUMENTS)
    assert isinstance(bad, MalformedCall)
    assert (bad.raw, bad.truncated) == (text, False)
    assert reason in bad.error


def test_a_reply_cut_anywhere_holds_only_calls_that_it_wrote_in_full() -> None:
    text = element("response", "I go.") + element("tools", GO + GO)
    for end in range(len(text)):
        calls = KIMI_K3.parse(text[:end]).tool_calls
        good = [call for call in calls if isinstance(call, ToolCall)]
        assert all(call.arguments == ARGUMENTS for call in good)
        assert all(call.truncated for call in calls if isinstance(call, MalformedCall))


@pytest.mark.long
@pytest.mark.parametrize(
    "unit", ["<|open|>", "<|open|>call ", '<|open|>call tool="go"<|sep|><|open|>argument key="', GO, "<|sep|>"]
)
def test_a_hostile_repetition_is_parsed_in_linear_time(unit: str) -> None:
    # A quadratic parser takes hours for this; a linear one seconds.
    assert KIMI_K3.parse(unit * 10_000).role == "assistant"
    assert (
        KIMI_K3.parse(f'<|open|>call tool="go"<|sep|><|open|>argument key="a"<|sep|>{unit * 10_000}').role
        == "assistant"
    )
