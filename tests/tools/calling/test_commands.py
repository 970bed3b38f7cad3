"""Calls read from typed text."""

from __future__ import annotations

import shlex
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.tools import read_calls
from agentgym.tools.calling.commands import split_typed_words
from agentgym.types import MalformedCall, ToolCall, ToolSpec

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "count": {"type": "integer"}},
}
TOOLS = {"take": ToolSpec("take", "", PARAMETERS), "look": ToolSpec("look", "", {"type": "object"})}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("take item=key count=2", {"item": "key", "count": 2}),
        ("take key 2", {"item": "key", "count": 2}),
        ('take item="old key"', {"item": "old key"}),
        ('take {"item": "key"}', {"item": "key"}),
        ('{"name": "take", "arguments": {"item": "key"}}', {"item": "key"}),
        ('<tool_call>\n{"name": "take", "arguments": {"item": "key"}}\n</tool_call>', {"item": "key"}),
        ("take 7", {"item": "7"}),
        ("take count=2 the captain's key", {"item": "the captain's key", "count": 2}),
        ("take", {}),
        ('take [{"a b": "c"}, 1] 2', {"item": '[{"a b": "c"}, 1]', "count": 2}),
        ('take item={"a": "b c"} count=[1]', {"item": '{"a": "b c"}', "count": [1]}),
        ("take [a] 2", {"item": "[a]", "count": 2}),
    ],
)
def test_a_person_may_write_a_call_in_many_ways(text: str, arguments: dict[str, Any]) -> None:
    assert read_calls(text, TOOLS) == (ToolCall("call_0", "take", arguments),)


@pytest.mark.parametrize("text", ["", "hello there", "Take it", "look here and there", "<tool_call", "the take"])
def test_other_text_holds_no_call(text: str) -> None:
    assert read_calls(text, TOOLS) == ()


def test_several_blocks_are_several_calls_and_a_broken_one_is_kept() -> None:
    text = '<tool_call>{"name": "look"}</tool_call> and <tool_call>{"name": </tool_call><tool_call>[1]</tool_call>'
    first, second, third = read_calls(text, TOOLS)
    assert first == ToolCall("call_0", "look", {})
    assert isinstance(second, MalformedCall)
    assert second.raw == '{"name":'
    assert isinstance(third, MalformedCall)


@pytest.mark.parametrize("key", ["parameters", "args", "input", "item"])
def test_a_call_with_an_unknown_key_is_kept_with_its_name(key: str) -> None:
    for text in (f'{{"name": "take", "{key}": {{}}}}', f'<tool_call>{{"name": "take", "{key}": {{}}}}</tool_call>'):
        (call,) = read_calls(text, TOOLS)
        assert isinstance(call, MalformedCall) and f'no "{key}"' in call.error
    assert read_calls('{"name": "look", "arguments": null}', TOOLS) == (ToolCall("call_0", "look", {}),)


@pytest.mark.parametrize("thinking", ["<think>{}</think>", "<think>{}"])
def test_a_call_inside_thinking_is_not_a_call(thinking: str) -> None:
    assert read_calls(thinking.format('<tool_call>{"name": "look"}</tool_call>'), TOOLS) == ()


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "take"',
    '"arguments": ',
    "{",
    "}",
    "take ",
]


@pytest.mark.long
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=8).map("".join))
def test_no_text_breaks_the_reader(text: str) -> None:
    for number, call in enumerate(read_calls(text, TOOLS)):
        assert call.id == f"call_{number}"


def test_json_nested_beyond_reason_is_a_malformed_call() -> None:
    (call,) = read_calls(f'<tool_call>{{"name": "take", "arguments": {"[" * 200_000}</tool_call>', TOOLS)
    assert isinstance(call, MalformedCall)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>a" + " " * 200_000 + "b</tool_call>",
        "<tool_call>" * 20_000,
        "<think>" * 20_000,
        "take " + "a=" * 100_000,
        "take " + "a''b" * 50_000,
        "take " + "\\" * 200_001,
        "take " + '"' + "\\a" * 200_000,
        "take " + "[ " * 100_000,
        "take " + "[1 " * 100_000,
        "take " + "[1]" * 100_000,
    ],
    ids=["blanks", "blocks", "thoughts", "values", "quotes", "backslashes", "an open quote", "[ ", "[1 ", "[1]"],
)
def test_a_long_text_is_read_in_a_time_in_proportion(text: str) -> None:
    before = time.thread_time()
    read_calls(text, TOOLS)
    assert time.thread_time() - before < 1.0


@given(st.text(alphabet=" \t\r\n\f\u00a0a=é'\"\\"))
def test_words_are_those_of_shlex(text: str) -> None:
    try:
        expected = shlex.split(text)
    except ValueError:
        with pytest.raises(ValueError, match="is not ended"):
            split_typed_words(text)
    else:
        assert split_typed_words(text) == expected
