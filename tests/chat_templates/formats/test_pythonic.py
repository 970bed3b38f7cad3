"""Lists of Python calls are calls wherever they stand, and text that looks like one is text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.pythonic import PYTHONIC
from agentgym.types import JSON, MalformedCall, Message, ToolCall, ToolSpec

GO = "[go(direction='north')]"
NORTH = ToolCall("call_0", "go", {"direction": "north"})


def parse(text: str, *, in_reasoning: bool = False) -> Message:
    return PYTHONIC.parse(text, in_reasoning=in_reasoning)


@pytest.mark.parametrize("text", [GO, f"<|python_start|>{GO}<|python_end|>", f"{GO}<|eot|>", f" {GO}\n<|eom|>"])
def test_one_call_is_read_with_and_without_the_marks_around_it(text: str) -> None:
    assert parse(text) == Message("assistant", "", tool_calls=(NORTH,))


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    message = parse('I will look.\n\n[look(),\n go(to={"x": [1, True]})]\n\nDone.')
    calls = (ToolCall("call_0", "look", {}), ToolCall("call_1", "go", {"to": {"x": [1, True]}}))
    assert message == Message("assistant", "I will look.\nDone.", tool_calls=calls)


def test_a_call_in_a_line_of_text_is_a_call() -> None:
    assert parse(f"So: {GO} and go.") == Message("assistant", "So:\nand go.", tool_calls=(NORTH,))


def test_calls_after_reasoning_are_calls_and_those_inside_are_not() -> None:
    expected = Message("assistant", "", f"Maybe {GO}", (NORTH,))
    assert parse(f"<think>\nMaybe {GO}\n</think>\n\n{GO}") == expected
    assert parse(f"Maybe {GO}\n</think>\n\n{GO}") == expected
    assert parse(f"Maybe {GO}\n</think>\n\n{GO}", in_reasoning=True) == expected


def test_a_call_inside_unclosed_reasoning_is_answered_and_never_run() -> None:
    message = parse(f"<think>Maybe {GO}")
    (call,) = message.tool_calls
    assert (message.content, message.reasoning) == ("", f"Maybe {GO}")
    assert isinstance(call, MalformedCall)
    assert call.raw == GO
    assert "</think>" in call.error


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2] and [x] and [look]() and a[f(x)] = 2",
        "See [note(1)] in the text.",
        "[link] (there)",
        "Hello.",
        "",
    ],
)
def test_text_that_is_no_list_of_calls_is_content_as_it_is(text: str) -> None:
    assert parse(text) == Message("assistant", text)


@pytest.mark.parametrize(
    "bad", ["[go(north)]", "[go(direction=north)]", "[go(direction='a' 7)]", "[go(direction='n') 7]"]
)
def test_what_begins_a_line_as_a_call_and_cannot_be_read_is_malformed(bad: str) -> None:
    message = parse(f"First.\n  {bad}\nThen {GO}")
    *_, unread, last = message.tool_calls
    assert isinstance(unread, MalformedCall)
    assert not unread.truncated
    assert unread.raw in bad
    assert "tool(name=" in unread.error
    assert isinstance(last, ToolCall)
    assert last.arguments == NORTH.arguments
    assert message.content == "First.\nThen"


def test_a_reply_cut_anywhere_holds_only_calls_that_it_wrote_in_full() -> None:
    text = "[go(direction='no\\'rth', steps=12), look(), say(text=\"[go()]\")]"
    whole = parse(text).tool_calls
    assert len(whole) == 3
    for end in range(len(text)):
        calls = parse(text[:end]).tool_calls
        good = [call for call in calls if isinstance(call, ToolCall)]
        assert tuple(good) == whole[: len(good)]
        assert all(call.truncated for call in calls if isinstance(call, MalformedCall))
        assert bool(calls) is (end >= len("[go("))


@given(
    st.lists(st.sampled_from([*PYTHONIC.marks, GO, "[", "go(", "'", '"', "\\", "]", ")", "x=", "\n", "é"]), max_size=30)
)
def test_any_text_gives_an_assistant_message_with_ids_in_order(parts: list[str]) -> None:
    message = parse("".join(parts))
    assert [call.id for call in message.tool_calls] == [f"call_{n}" for n in range(len(message.tool_calls))]


@pytest.mark.long
@pytest.mark.parametrize("unit", ["[go(", "[go(x='", "x[go(x=", "<think>", "</think>", "[", "<|python_start|>", "[ "])
def test_a_hostile_repetition_is_parsed_in_linear_time(unit: str) -> None:
    # A quadratic parser takes hours for this; a linear one seconds.
    assert parse(unit * 20_000).role == "assistant"
    assert parse(f"x {unit * 20_000}").role == "assistant"


STEPS: JSON = {"to": {"type": "string"}, "steps": {"type": "integer"}, "stops": {"type": "array"}}
WALK = ToolSpec("walk", "Walks.", {"type": "object", "properties": STEPS})


def test_values_that_all_stand_in_quotes_are_read_by_the_tool_s_schema() -> None:
    (call,) = PYTHONIC.parse("""[walk(to="3", steps="3", stops="['a', None]", n="3")]""", (WALK,)).tool_calls
    assert call == ToolCall("call_0", "walk", {"to": "3", "steps": 3, "stops": ["a", None], "n": "3"})
    (call,) = PYTHONIC.parse('[walk(steps="few", stops="{}")]', (WALK,)).tool_calls
    assert call == ToolCall("call_0", "walk", {"steps": "few", "stops": "{}"})


def test_quotes_within_quotes_are_read_in_the_last_list_where_the_reply_ends_with_it() -> None:
    text = '[walk(to="a "b" c", steps="1")]'
    assert parse(text).tool_calls == (ToolCall("call_0", "walk", {"to": 'a "b" c', "steps": "1"}),)
    for broken in (f"{text} and more", f"{text}\n[walk()]"):
        assert isinstance(parse(broken).tool_calls[0], MalformedCall)
