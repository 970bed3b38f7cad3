"""Calls in Python's syntax are read one by one, and a bad one does not take the others."""

from __future__ import annotations

import pytest

from agentgym.chat_templates.formats.protocol import ReplyContext
from agentgym.chat_templates.formats.python_call import read_python_calls
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.formats.tagged import FoundCall, UnreadCall
from agentgym.types import JSON, ToolCall, ToolSpec

LOOK = FoundCall("look", {})
TAGS = ("<|tool_call_start|>", "<|tool_call_end|>")


def calls(body: str) -> list[FoundCall | UnreadCall]:
    return list(read_python_calls(body, ReplyContext()))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("[look()]", [LOOK]),
        (" [ look( ) , ] ", [LOOK]),
        ("look()\nlook()", [LOOK, LOOK]),
        ("[look(), look()]", [LOOK, LOOK]),
        ("[]", []),
        ("[ ]", []),
        ("[a.b-c.d(x=1)]", [FoundCall("a.b-c.d", {"x": 1})]),
        ("[go(class='x', from_='y',)]", [FoundCall("go", {"class": "x", "from_": "y"})]),
        (
            "[go(\n  to = 'north',\n  steps=[1, {'a': (2, 3)}]\n)]",
            [FoundCall("go", {"to": "north", "steps": [1, {"a": [2, 3]}]})],
        ),
        ("[é_1(ü='日本')]", [FoundCall("é_1", {"ü": "日本"})]),
    ],
)
def test_calls_are_read_alone_in_a_list_and_one_a_line(body: str, expected: list[FoundCall]) -> None:
    assert calls(body) == expected


@pytest.mark.parametrize("family", ["pythonic", "lfm2", "olmo3_pythonic"])
def test_digits_that_begin_with_a_zero_are_a_text_unless_the_schema_allows_no_text(family: str) -> None:
    properties: dict[str, JSON] = {"month": {"type": "integer"}, "code": {"type": ["integer", "string"]}, "any": {}}
    go = ToolSpec("go", "", {"type": "object", "properties": properties})
    opening, closing = {"lfm2": TAGS, "olmo3_pythonic": ("<function_calls>", "</function_calls>")}.get(family, ("", ""))
    text = f"{opening}[go(month=05, code=00501, any=007, other=-01, list=[02])]{closing}"
    (call,) = FORMATS[family].parse(text, [go]).tool_calls
    expected = {"month": 5, "code": "00501", "any": "007", "other": "-01", "list": ["02"]}
    assert isinstance(call, ToolCall) and call.arguments == expected


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("go(b'z')", "argument's name"),
        ("go(x=b'z')", "bytes"),
        ("go('north')", "argument's name"),
        ("go(x==1)", "argument's name"),
        ("go(x=1, x=2)", "given twice"),
        ("go(x=y)", "expected a literal"),
        ("go(**{'x': 1})", "argument's name"),
        ("go(x=1 2)", "expected )"),
        ("go", "expected a call"),
        ("7()", "expected a call"),
    ],
)
def test_a_call_that_cannot_be_read_stands_between_those_that_can(bad: str, reason: str) -> None:
    first, unread, *rest = calls(f"[look(), {bad}]")
    assert first == LOOK
    assert isinstance(unread, UnreadCall)
    assert unread.raw.startswith(bad[:2])
    assert reason in unread.error
    assert "tool(name=" in unread.error
    assert not any(isinstance(call, FoundCall) for call in rest)


def test_reading_goes_on_at_the_next_call() -> None:
    first, unread, last = calls("[look(), go(1), look()]")
    assert (first, last) == (LOOK, LOOK)
    assert isinstance(unread, UnreadCall)
    assert unread.raw == "go(1)"


@pytest.mark.parametrize("body", ["", "  ", "["])
def test_a_body_that_ends_before_a_call_is_refused(body: str) -> None:
    with pytest.raises(ValueError, match="expected a call"):
        calls(body)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("[sh(c='sed -n '3,4p' a.py')]", {"c": "sed -n '3,4p' a.py"}),
        ('[sh(c="say "hi" now", n=2)]', {"c": 'say "hi" now', "n": 2}),
        ("[sh(n=2, c='a 'b' c', d='e')]", {"n": 2, "c": "a 'b' c", "d": "e"}),
        (r"[sh(c='it\'s 'so'')]", {"c": "it's 'so'"}),
    ],
)
def test_same_quotes_inside_a_string_are_text_where_the_string_cannot_end(
    body: str, arguments: dict[str, object]
) -> None:
    assert calls(body) == [FoundCall("sh", arguments)]  # type: ignore[arg-type]


def test_many_calls_that_cannot_be_read_are_read_in_linear_time() -> None:
    # A quadratic reader takes hours for each of these; a linear one seconds.
    for unit in ("f(x='a 'b, ", "f(x=', ", 'f(x="\\', "f(x),", "'", "f(x='a',"):
        assert calls(unit * 20_000) is not None
