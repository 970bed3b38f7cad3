"""A reply's text becomes a message, whatever the text."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.hermes import HERMES
from agentgym.chat_templates.formats.reply import reply_problem
from agentgym.types import MalformedCall, Message, ToolCall

MARKS = re.compile("|".join(map(re.escape, HERMES.marks)))
GOOD = '<tool_call>\n{"name": "go", "arguments": {"direction": "north"}}\n</tool_call>'
NORTH = {"direction": "north"}


def parse(text: str, *, in_reasoning: bool = False) -> Message:
    return HERMES.parse(text, in_reasoning=in_reasoning)


def test_text_alone_is_content_as_it_is() -> None:
    assert parse("  Hello.\n") == Message("assistant", "  Hello.\n")


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    message = parse(f"First.\n{GOOD}\nThen.\n{GOOD.replace('north', 'south')}\nDone.")
    calls = (ToolCall("call_0", "go", NORTH), ToolCall("call_1", "go", {"direction": "south"}))
    assert message == Message("assistant", "First.\nThen.\nDone.", tool_calls=calls)


def test_calls_after_reasoning_are_calls() -> None:
    message = parse(f"<think>\nNorth it is.\n</think>\n\n{GOOD}")
    assert message == Message("assistant", "", "North it is.", (ToolCall("call_0", "go", NORTH),))


def test_a_call_inside_closed_reasoning_is_not_a_call() -> None:
    message = parse(f"<think>\nMaybe {GOOD}\n</think>\n\nNo.")
    assert message == Message("assistant", "No.", f"Maybe {GOOD}")


def test_a_call_inside_unclosed_reasoning_is_answered_and_never_run() -> None:
    message = parse(f"Hm.<think>\nMaybe {GOOD} and {GOOD}")
    (call,) = message.tool_calls
    assert message.content == ""
    assert message.reasoning == f"Maybe {GOOD} and {GOOD}"
    assert isinstance(call, MalformedCall)
    assert call.id == "call_0"
    assert call.raw == f"{GOOD} and {GOOD}"
    assert "</think>" in call.error


def test_unclosed_reasoning_without_a_call_is_a_parse_error() -> None:
    message = parse("<think>\nI wonder")
    assert message == Message("assistant", "", "I wonder")
    assert "</think>" in (reply_problem(message) or "")


def test_reasoning_that_the_prompt_opened_ends_at_its_mark() -> None:
    message = parse(f"Maybe {GOOD}\n</think>\n\n{GOOD}", in_reasoning=True)
    assert message.reasoning == f"Maybe {GOOD}"
    assert message.tool_calls == (ToolCall("call_0", "go", NORTH),)


def test_an_end_of_reasoning_that_nothing_opened_makes_reasoning_of_all_before_it() -> None:
    assert parse(f"Maybe {GOOD}\n</think>\nThe answer is 42.") == Message(
        "assistant", "The answer is 42.", f"Maybe {GOOD}"
    )


@pytest.mark.parametrize(
    ("message", "is_problem"),
    [
        (Message("assistant", "Hi."), False),
        (Message("assistant", "", tool_calls=(ToolCall("call_0", "go", {}),)), False),
        (Message("assistant", " \n"), True),
        (Message("assistant", "", "Hm."), True),
    ],
)
def test_a_reply_without_content_or_call_is_a_problem(message: Message, is_problem: bool) -> None:
    assert (reply_problem(message) is not None) is is_problem


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{bad json here}", "invalid JSON"),
        ('{"name": "go", "arguments": {"direction": "no', "invalid JSON"),
        ("[]", "a call is a JSON object, got a list"),
        ("null", "got null"),
        ("7", "got the value 7"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": "", "arguments": {}}', '"name"'),
        ('{"name": 3, "arguments": {}}', '"name"'),
        ('{"name": "go", "arguments": [1]}', "got a list"),
        ('{"name": "go", "arguments": "north"}', "invalid JSON"),
        ('{"name": "go", "arguments": "[1]"}', "got a list"),
        ('{"name": "go", "arguments": {"n": NaN}}', "NaN"),
        ('{"name": "go", "arguments": {"n": -Infinity}}', "Infinity"),
        ('{"name": "go", "arguments": {"n": 1e999}}', "too large"),
        ('{"name": "go", "arguments": {"n": ' + "9" * 5000 + "}}", "digits"),
        ('{"name": "go", "arguments": {"n": "\\ud800"}}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
        ("", "invalid JSON"),
        ('{"name": "go", "arguments": {}} {"name": "go"}', "Extra data"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_with_its_reason_among_the_good_ones(body: str, reason: str) -> None:
    message = parse(f"{GOOD}<tool_call>{body}</tool_call>{GOOD}")
    first, bad, last = message.tool_calls
    assert first == ToolCall("call_0", "go", NORTH)
    assert last == ToolCall("call_2", "go", NORTH)
    assert isinstance(bad, MalformedCall)
    assert (bad.id, bad.raw) == ("call_1", f"<tool_call>{body}</tool_call>")
    assert reason in bad.error


def test_arguments_may_be_a_json_string_or_absent() -> None:
    encoded = json.dumps({"name": "go", "arguments": json.dumps(NORTH)})
    text = f'<tool_call>{encoded}</tool_call><tool_call>{{"name": "look"}}'
    assert parse(text).tool_calls == (ToolCall("call_0", "go", NORTH), ToolCall("call_1", "look", {}))


def test_a_call_cut_anywhere_is_malformed_or_the_whole_call_never_another() -> None:
    for end in range(len("<tool_call>"), len(GOOD)):
        (call,) = parse(GOOD[:end]).tool_calls
        is_complete = GOOD[:end].rstrip().endswith("}}")
        assert call == ToolCall("call_0", "go", NORTH) if is_complete else isinstance(call, MalformedCall)


def test_a_call_that_another_one_interrupts_is_malformed() -> None:
    interrupted, whole = parse('<tool_call>{"name": "go", "arguments": {}}' + GOOD).tool_calls
    assert isinstance(interrupted, MalformedCall)
    assert whole == ToolCall("call_1", "go", NORTH)


@given(st.lists(st.one_of(st.sampled_from([*HERMES.marks, GOOD, "\n", "{", '"']), st.text(max_size=5)), max_size=30))
def test_any_text_gives_an_assistant_message_with_ids_in_order(parts: list[str]) -> None:
    message = parse("".join(parts))
    assert message.role == "assistant"
    assert [call.id for call in message.tool_calls] == [f"call_{n}" for n in range(len(message.tool_calls))]


@pytest.mark.long
@pytest.mark.parametrize(
    "unit", ["<think>", "</think>", "<tool_call>", "<think>a</think>b", GOOD, "a<think></think>", "<"]
)
def test_a_hostile_repetition_is_parsed_in_linear_time(unit: str) -> None:
    # A quadratic parser takes hours for this; a linear one a second.
    assert parse(unit * 40_000).role == "assistant"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=3), x),
        max_leaves=5,
    )
)
def test_any_json_argument_arrives_unchanged(value: object) -> None:
    body = json.dumps({"name": "go", "arguments": {"x": value}})
    (call,) = parse(f"<tool_call>{body}</tool_call>" if not MARKS.search(body) else GOOD).tool_calls
    assert isinstance(call, ToolCall)
    assert call.arguments in ({"x": value}, NORTH)
