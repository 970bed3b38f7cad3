"""What is GLM's and Hunyuan's own way of writing calls."""

from __future__ import annotations

import pytest

from agentgym.chat_templates.formats.glm import GLM, HUNYUAN_V3
from agentgym.types import MalformedCall, ToolCall


def test_values_without_a_schema_are_the_json_that_they_spell() -> None:
    values = {"a": "42", "b": "1.5", "c": "true", "d": "null", "e": "text", "f": '{"x": [1]}', "g": '"q"', "h": " s "}
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    (call,) = GLM.parse(f"<tool_call>go\n{inside}</tool_call>").tool_calls
    arguments = {"a": 42, "b": 1.5, "c": True, "d": None, "e": "text", "f": {"x": [1]}, "g": '"q"', "h": " s "}
    assert call == ToolCall("call_0", "go", arguments)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "go", "arguments": {}}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>is how a call begins</tool_call>",
        "<tool_call>go<arg_key>to</arg_key></tool_call>",
        "<tool_call>go<arg_value>north</arg_value></tool_call>",
        "<tool_call>go<arg_key>to</arg_key><arg_value>north</arg_value> and on</tool_call>",
    ],
)
def test_what_is_no_whole_call_is_malformed_and_kept(text: str) -> None:
    broken, good = GLM.parse(f"{text}<tool_call>go</tool_call>").tool_calls
    assert isinstance(broken, MalformedCall)
    assert (broken.raw, broken.truncated) == (text, False)
    assert good == ToolCall("call_1", "go", {})


def test_hunyuans_frames_and_separators_are_no_content() -> None:
    call = "<tool_call>go<tool_sep>\n</tool_call>"
    message = HUNYUAN_V3.parse(f"I go.<tool_calls>\n{call}\n{call}\n</tool_calls>")
    assert message.content == "I go."
    assert message.tool_calls == (ToolCall("call_0", "go", {}), ToolCall("call_1", "go", {}))


def test_a_value_that_does_not_close_ends_with_its_call() -> None:
    message = GLM.parse("<tool_call>go<arg_key>to</arg_key><arg_value>north</tool_call>")
    assert message.tool_calls == (ToolCall("call_0", "go", {"to": "north"}),)
