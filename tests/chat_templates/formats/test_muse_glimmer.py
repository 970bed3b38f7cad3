"""Muse Glimmer's messages to itself, to the user and to tools become reasoning, content and calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.muse_glimmer import MUSE_GLIMMER
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

NEXT = "<|start|>assistant"


def invoke(name: str, **arguments: str) -> str:
    inside = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in arguments.items())
    return f'<atem:invoke name="{name}">\n{inside}</atem:invoke>\n'


def to(name: str, *invokes: str) -> str:
    return f" to={name}<|message|><atem:function_calls>\n{''.join(invokes)}</atem:function_calls><|eom|>"


GO = to("go", invoke("go", direction="north"))
CALL = ToolCall("call_0", "go", {"direction": "north"})


def test_recipients_are_reasoning_calls_and_content() -> None:
    last = f"{NEXT}{to('look', invoke('look'))}{NEXT} to=user<|message|>Done.<|eot|>"
    text = f" to=self<|message|>Hm.<|eom|>{NEXT}{GO}{last}"
    calls = (CALL, ToolCall("call_1", "look", {}))
    assert MUSE_GLIMMER.parse(text) == Message("assistant", "Done.", "Hm.", calls)


@pytest.mark.parametrize(
    "text", ["Hello.", "<|message|>Hello.<|eot|>", " to=user<|message|>Hello.", f"{NEXT}<|message|>Hello."]
)
def test_what_is_for_the_user_or_for_nobody_is_content(text: str) -> None:
    assert MUSE_GLIMMER.parse(text) == Message("assistant", "Hello.")


@pytest.mark.parametrize("name", ["self", "user"])
def test_a_call_spelled_to_another_recipient_is_not_a_call(name: str) -> None:
    assert not MUSE_GLIMMER.parse(GO.replace("to=go", f"to={name}")).tool_calls


def test_arguments_are_read_by_the_schema_and_else_as_json_or_text() -> None:
    tool = ToolSpec("go", "", {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}})
    text = to("go", invoke("go", s="3", n="3", x="[1]", y="north"))
    (call,) = MUSE_GLIMMER.parse(text, [tool]).tool_calls
    assert call == ToolCall("call_0", "go", {"s": "3", "n": 3, "x": [1], "y": "north"})


def test_a_doubled_name_is_the_tool_that_was_shown_and_no_other_name_is_changed() -> None:
    text = to("go.go", invoke("go.go"), invoke("look.go"), invoke("look.look"))
    names = [
        call.name
        for call in MUSE_GLIMMER.parse(text, [ToolSpec("go", "", {})]).tool_calls
        if isinstance(call, ToolCall)
    ]
    assert names == ["go", "look.go", "look.look"]


@pytest.mark.parametrize(
    "body", ["north", "", "<atem:function_calls></atem:function_calls>", '<atem:invoke name="go">']
)
def test_a_message_to_a_tool_that_holds_no_call_is_malformed(body: str) -> None:
    (call,) = MUSE_GLIMMER.parse(f" to=go<|message|>{body}<|eom|>").tool_calls
    assert isinstance(call, MalformedCall)
    assert not call.truncated
    assert body in call.raw
    assert "<atem:invoke" in call.error


def test_a_reply_cut_anywhere_holds_the_call_only_with_its_end() -> None:
    for end in range(len(GO)):
        message = MUSE_GLIMMER.parse(GO[:end])
        if "</atem:invoke>" in GO[:end]:
            assert message.tool_calls == (CALL,)
        else:
            assert all(isinstance(call, MalformedCall) and call.truncated for call in message.tool_calls)
            assert bool(message.tool_calls) is (end >= len(" to="))


@given(st.lists(st.sampled_from([*MUSE_GLIMMER.marks, GO, "to=", "go", " ", "{}", '"go">', "é"]), max_size=20))
def test_any_text_gives_an_assistant_message_with_ids_in_order(parts: list[str]) -> None:
    message = MUSE_GLIMMER.parse("".join(parts))
    assert [call.id for call in message.tool_calls] == [f"call_{n}" for n in range(len(message.tool_calls))]


@pytest.mark.long
@pytest.mark.parametrize(
    "unit", [*MUSE_GLIMMER.marks, GO, '<atem:invoke name="go"><atem:parameter name="a">', " to=go<|message|>"]
)
def test_a_hostile_repetition_is_parsed_in_linear_time(unit: str) -> None:
    # A quadratic parser takes hours for this; a linear one seconds.
    assert MUSE_GLIMMER.parse(unit * 10_000).role == "assistant"
    assert MUSE_GLIMMER.parse(f" to=go<|message|>{unit * 10_000}").role == "assistant"
