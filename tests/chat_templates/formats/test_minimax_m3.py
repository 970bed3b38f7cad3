"""MiniMax M3's elements become nested arguments, by the tool's schema where there is one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.minimax_m3 import MINIMAX_M3
from agentgym.types import JSON, MalformedCall, Message, ToolCall, ToolSpec

MARK = "]<]minimax[>["
ORDER: JSON = {
    "type": "object",
    "properties": {
        "zip": {"type": "string"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
        "item": {"type": "integer"},
    },
}
LINE: JSON = {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}}
PARAMETERS = {"type": "object", "properties": {"order": ORDER, "tags": {"type": "array"}}, "$defs": {"Line": LINE}}
TOOL = ToolSpec("buy", "", PARAMETERS)


def element(tag: str, value: JSON) -> str:
    if isinstance(value, dict):
        inside = "".join(element(key, inner) for key, inner in value.items())
    elif isinstance(value, list):
        inside = "".join(element("item", inner) for inner in value)
    else:
        inside = value if isinstance(value, str) else json.dumps(value)
    return f"{MARK}<{tag}>{inside}{MARK}</{tag}>"


def parse(inside: str, *tools: ToolSpec) -> Message:
    return MINIMAX_M3.parse(f'{MARK}<tool_call>\n{MARK}<invoke name="buy">{inside}{MARK}</invoke>\n', tools)


def test_nested_elements_are_objects_and_lists_by_the_schema() -> None:
    order: JSON = {"zip": "018956", "lines": [{"sku": "7", "count": 2}, {"sku": "<b>", "count": 1}]}
    assert parse(element("order", order), TOOL).tool_calls == (ToolCall("call_0", "buy", {"order": order}),)
    only_item: JSON = {"item": 3}
    assert parse(element("order", only_item), TOOL).tool_calls == (ToolCall("call_0", "buy", {"order": only_item}),)
    for empty in ("", "\n"):
        assert parse(element("tags", empty), TOOL).tool_calls == (ToolCall("call_0", "buy", {"tags": []}),)


def test_without_a_schema_items_are_a_list_and_other_elements_an_object() -> None:
    arguments: JSON = {"a": [1, "x", [True]], "b": {"c": 2.5}, "d": "text"}
    inside = "\n".join(element(key, value) for key, value in arguments.items())
    assert parse(inside).tool_calls == (ToolCall("call_0", "buy", arguments),)


@pytest.mark.parametrize(
    "inside",
    [
        "text",
        f"{MARK}<a>1{MARK}</b>",
        f"{MARK}<a>1",
        f"{MARK}</a>",
        f"{MARK}<a>text{MARK}<b>1{MARK}</b>{MARK}</a>",
        f'{MARK}<a>{MARK}<invoke name="buy">',
        f"{MARK}<a>" * 40,
    ],
)
def test_elements_that_do_not_fit_together_are_malformed(inside: str) -> None:
    broken, *further = parse(inside).tool_calls
    assert isinstance(broken, MalformedCall)
    assert f"{MARK}<tool_call>" in broken.error
    assert all(isinstance(call, ToolCall) and call.arguments == {} for call in further)


PIECES = [MARK, f"{MARK}<a>", f"{MARK}</a>", f"{MARK}<item>", f"{MARK}</item>", f"{MARK}<tags>", f"{MARK}</tags>", "x"]


@given(parts=st.lists(st.sampled_from([*PIECES, f"{MARK}</invoke>", f'{MARK}<invoke name="buy">']), max_size=30))
def test_any_elements_in_a_call_are_read(parts: list[str]) -> None:
    for tools in ((), (TOOL,)):
        calls = parse("".join(parts), *tools).tool_calls
        assert calls
        assert all(isinstance(call, MalformedCall) or call.name == "buy" for call in calls)
