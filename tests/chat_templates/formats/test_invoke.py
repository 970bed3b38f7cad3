"""What is each family's own way of writing `invoke` elements."""

from __future__ import annotations

import pytest

from agentgym.chat_templates.formats.invoke import DEEPSEEK_V32, DEEPSEEK_V41, DOTS, MINICPM5, MINIMAX_M2, STEP3
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.types import JSON, AnyCall, MalformedCall, ToolCall, ToolSpec

TOOL = ToolSpec("go", "", {"type": "object", "properties": {"to": {"type": "string"}, "steps": {"type": "integer"}}})


def dsml(attribute: str, value: str) -> JSON:
    parameter = f'<｜DSML｜parameter name="steps"{attribute}>{value}</｜DSML｜parameter>'
    text = f'<｜DSML｜invoke name="go">\n{parameter}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    (call,) = DEEPSEEK_V32.parse(text, [TOOL]).tool_calls
    assert isinstance(call, ToolCall)
    return call.arguments["steps"]


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        (' string="true"', "3", "3"),
        (' string="false"', "3", 3),
        (' string="false"', '"3"', "3"),
        (' string="false"', '{"a": [1]}', {"a": [1]}),
        (' string="false"', "a few", "a few"),
        ("", "3", 3),
    ],
)
def test_deepseeks_values_are_what_their_tags_declare(attribute: str, value: str, expected: JSON) -> None:
    assert dsml(attribute, value) == expected


@pytest.mark.parametrize("name", ['"go"', "'go'", "go"])
def test_a_name_may_stand_in_quotes_of_either_kind_or_in_none(name: str) -> None:
    text = f"<minimax:tool_call><invoke name={name}><parameter name={name}> 1 </parameter></invoke></minimax:tool_call>"
    assert MINIMAX_M2.parse(text).tool_calls == (ToolCall("call_0", "go", {"go": " 1 "}),)


def dots(text: str) -> tuple[AnyCall, ...]:
    return DOTS.parse(f"<dots_function_call>{text}</dots_function_call>", [TOOL]).tool_calls


def test_dots_may_write_a_call_as_json() -> None:
    assert dots('{"name": "go", "arguments": {"to": "</dots_function_call>"}}') == (
        ToolCall("call_0", "go", {"to": "</dots_function_call>"}),
    )
    assert dots(' {"name": "go", "parameters": {}} ') == (ToolCall("call_0", "go", {}),)
    assert dots('{"name": "go"}\n<invoke name="go"></invoke>') == (
        ToolCall("call_0", "go", {}),
        ToolCall("call_1", "go", {}),
    )


@pytest.mark.parametrize("inside", ['{"arguments": {}}', '{"name": go}', '{"name": "go"', "[1]", "go()", ""])
def test_json_that_is_no_call_is_malformed_and_kept(inside: str) -> None:
    (broken,) = dots(inside)
    assert isinstance(broken, MalformedCall)
    assert broken.raw == f"<dots_function_call>{inside}</dots_function_call>"


def test_step3s_opening_alone_is_a_truncated_call() -> None:
    text = '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="go">'
    (broken,) = STEP3.parse(text).tool_calls
    assert isinstance(broken, MalformedCall)
    assert (broken.raw, broken.truncated) == (text, True)


def minicpm(value: str) -> JSON:
    text = f'<function name="go"><param name="to">{value}</param></function>'
    (call,) = MINICPM5.parse(text, [TOOL]).tool_calls
    assert isinstance(call, ToolCall)
    return call.arguments["to"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("<![CDATA[a < b && c\n</function></param> &lt;]]>", "a < b && c\n</function></param> &lt;"),
        ("\n<![CDATA[ a ]] > ]]>\n", " a ]] > "),
        ("St. John&apos;s &amp; Co &lt;b&gt; &copy;", "St. John's & Co <b> &copy;"),
        ("a & b < c", "a & b < c"),
        ("&amp;lt;", "&lt;"),
    ],
)
def test_minicpms_values_are_characters_of_xml(value: str, expected: str) -> None:
    assert minicpm(value) == expected


def test_a_section_that_does_not_close_is_a_truncated_call() -> None:
    text = '<function name="go"><param name="to"><![CDATA[ </param></function>'
    (broken,) = MINICPM5.parse(text, [TOOL]).tool_calls
    assert isinstance(broken, MalformedCall)
    assert (broken.raw, broken.truncated) == (text, True)


SPACED = """<｜DSML｜ calls>
<｜DSML｜ invoke name="go">
<｜DSML｜ parameter name="to" string="true">north</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""
COLLAPSED = '<functionname="go"><param name="to">north</param></function>'


def test_deepseek_v4_1_writes_a_space_in_its_marks() -> None:
    message = DEEPSEEK_V41.parse(f"<think>North?</think>I go north.\n\n{SPACED}", [TOOL])
    assert (message.reasoning, message.content) == ("North?", "I go north.")
    assert message.tool_calls == (ToolCall("call_0", "go", {"to": "north"}),)
    opening, invoke = SPACED.split("\n", 1)[0], SPACED.split("\n", 1)[1].rpartition("\n")[0]
    two = DEEPSEEK_V41.parse(f"{opening}\n{invoke}\n{invoke}\n</｜DSML｜ calls>", [TOOL]).tool_calls
    assert two == tuple(ToolCall(f"call_{index}", "go", {"to": "north"}) for index in range(2))


@pytest.mark.parametrize(
    ("reply_format", "text"),
    [(DEEPSEEK_V32, SPACED), (DEEPSEEK_V41, SPACED.replace("｜ ", "｜")), (MINICPM5, COLLAPSED)],
    ids=["spaced marks", "marks without a space", "collapsed tag"],
)
def test_a_call_in_marks_that_are_nearly_the_familys_is_malformed_and_no_content(
    reply_format: ReplyFormat, text: str
) -> None:
    message = reply_format.parse(f"I go north.{text}")
    assert message.content.strip() == "I go north."
    (call,) = message.tool_calls
    assert isinstance(call, MalformedCall) and call.raw == text and not call.truncated
    assert "is no mark of a call. Write <" in call.error
    (first, second) = reply_format.parse(f"{text}\n{text}").tool_calls
    assert isinstance(first, MalformedCall) and isinstance(second, MalformedCall)
    (cut,) = reply_format.parse(text[: len(text) // 2]).tool_calls
    assert isinstance(cut, MalformedCall) and cut.truncated
    (inside,) = reply_format.parse(f"<think>{text}").tool_calls
    assert isinstance(inside, MalformedCall) and "</think>" in inside.error
