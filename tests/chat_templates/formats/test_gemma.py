"""Gemma's notation of calls is read as the template writes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.gemma import FUNCTION_GEMMA, GEMMA4
from agentgym.types import JSON, MalformedCall, Message, ToolCall, ToolSpec

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GO = f"{OPEN}call:go{{direction:{QUOTE}north{QUOTE}}}{CLOSE}"
NORTH = {"direction": "north"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet="abcé_1", min_size=1, max_size=3), inner),
    max_leaves=8,
)


def written(value: object) -> str:
    """A value in Gemma's notation."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.long
@given(st.dictionaries(st.text(alphabet="abcé_1", min_size=1, max_size=3), VALUES, max_size=4))
def test_any_arguments_are_read_back(arguments: dict[str, JSON]) -> None:
    (call,) = GEMMA4.parse(f"{OPEN}call:go{written(arguments)}{CLOSE}").tool_calls
    assert call == ToolCall("call_0", "go", arguments)


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    message = GEMMA4.parse(f"First.{GO}\nThen.{OPEN}call:a.b-c{{}}{CLOSE}<|tool_response>more")
    calls = (ToolCall("call_0", "go", NORTH), ToolCall("call_1", "a.b-c", {}))
    assert message == Message("assistant", "First.\nThen.", tool_calls=calls)


@pytest.mark.parametrize("end", ["", "<channel|>"])
def test_reasoning_stands_on_its_channel(end: str) -> None:
    message = GEMMA4.parse(f"<|channel>thought\nOr {GO}?\n<channel|>Text.{end}{GO}<turn|>")
    assert message == Message("assistant", "Text.", f"Or {GO}?", (ToolCall("call_0", "go", NORTH),))
    assert GEMMA4.parse(f"<|channel>thought\n<channel|>Text.{end}") == Message("assistant", "Text.")


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        (f"call:go{{direction:{QUOTE}north{QUOTE}}}", "go", NORTH),
        (":go{n:1}", "go", {"n": 1}),
        ("go{n:1}", "go", {"n": 1}),
        ("call:look", "look", {}),
        (
            f" call:go {{ {QUOTE}a b{QUOTE} : [1, 2.5, true, null, None, word] , b:{{c:{QUOTE}}},]{QUOTE}}} }} ",
            "go",
            {"a b": [1, 2.5, True, None, None, "word"], "b": {"c": "},]"}},
        ),
    ],
)
def test_a_call_is_read_in_the_ways_that_models_write_it(body: str, name: str, arguments: dict[str, JSON]) -> None:
    assert GEMMA4.parse(f"{OPEN}{body}{CLOSE}").tool_calls == (ToolCall("call_0", name, arguments),)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "tool's name"),
        ("call:{}", "tool's name"),
        ("call:go{n:}", "expected a value"),
        ("call:go{n}", "expected a name"),
        ("call:go{n:1", "expected }"),
        ("call:go{n:1}}", "end of the call"),
        (f"call:go{{n:{QUOTE}open}}", "no end"),
        ("call:go{n:[1}", "expected ]"),
        ("call:go" + "{a:" * 10_000, "nested too deeply"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_with_its_reason_among_the_good_ones(body: str, reason: str) -> None:
    first, bad, last = GEMMA4.parse(f"{GO}{OPEN}{body}{CLOSE}{GO}").tool_calls
    assert (first, last) == (ToolCall("call_0", "go", NORTH), ToolCall("call_2", "go", NORTH))
    assert isinstance(bad, MalformedCall)
    assert (bad.raw, bad.truncated) == (f"{OPEN}{body}{CLOSE}", False)
    assert reason in bad.error


def test_a_reply_cut_anywhere_holds_no_call() -> None:
    for end in range(len(OPEN), len(GO)):
        (call,) = GEMMA4.parse(GO[:end]).tool_calls
        assert isinstance(call, MalformedCall)
        assert call.truncated


def test_function_gemma_has_marks_of_its_own() -> None:
    text = "Text.<start_function_call>call:go{direction:<escape>north<escape>,n:2}<end_function_call>"
    expected = Message("assistant", "Text.", tool_calls=(ToolCall("call_0", "go", {"direction": "north", "n": 2}),))
    assert FUNCTION_GEMMA.parse(f"{text}<start_function_response>") == expected


@given(
    st.lists(
        st.sampled_from([*GEMMA4.marks, *FUNCTION_GEMMA.marks, "call:go", "{", "}", "[", "a:", ",", "1", "\n", "é"]),
        max_size=20,
    )
)
def test_any_text_gives_an_assistant_message(parts: list[str]) -> None:
    text = "".join(parts)
    assert GEMMA4.parse(text).role == FUNCTION_GEMMA.parse(text).role == "assistant"


@pytest.mark.long
@pytest.mark.parametrize("unit", [*GEMMA4.marks, GO, f"{OPEN}call:go{{a:{QUOTE}", "{", "[", f"{OPEN}call:go{{a:["])
def test_a_hostile_repetition_is_parsed_in_linear_time(unit: str) -> None:
    # A quadratic parser takes hours for these; a linear one seconds.
    assert GEMMA4.parse(unit * 10_000).role == "assistant"
    assert GEMMA4.parse(f"{OPEN}call:go{{a:{unit * 10_000}").role == "assistant"


def test_functiongemma_values_between_marks_are_read_by_the_schema_of_the_tool() -> None:
    properties: JSON = {"to": {"type": "string"}, "n": {"type": "integer"}, "more": {"type": "object"}}
    tool = ToolSpec("go", "Walks.", {"type": "object", "properties": properties})
    values = "to:<escape>1<escape>,n:<escape>1<escape>,more:<escape>{'deep': True}<escape>"
    text = f"<start_function_call>call:go{{{values}}}<end_function_call>"
    (call,) = FUNCTION_GEMMA.parse(text, (tool,)).tool_calls
    assert call == ToolCall("call_0", "go", {"to": "1", "n": 1, "more": {"deep": True}})
    (call,) = FUNCTION_GEMMA.parse(text).tool_calls
    assert call == ToolCall("call_0", "go", {"to": "1", "n": "1", "more": "{'deep': True}"})
