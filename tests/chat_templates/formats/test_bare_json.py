"""Calls that stand in a reply as bare JSON are told from JSON that is content."""

from __future__ import annotations

import pytest

from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.types import MalformedCall, Message, ToolCall

GO = '{"name": "go", "parameters": {"direction": "north"}}'
NORTH = {"direction": "north"}
families = pytest.mark.parametrize("family", ["llama3_json", "plain_json", "xlam", "gemma2_generic"])


def parse(family: str, text: str) -> Message:
    return FORMATS[family].parse(text)


@families
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (GO, ""),
        (f"I go.\n{GO}", "I go."),
        (f"Here it is: {GO} Shall I?", "Here it is:\nShall I?"),
        (f"I go:\n```json\n{GO}\n```\nDone.", "I go:\nDone."),
        (f"[{GO}]", ""),
        (f"[see {GO}", "[see"),
        (f"Sets {{a}} and {{b}}: {GO}", "Sets {a} and {b}:"),
        (GO.replace("parameters", "arguments"), ""),
        ('{"type": "function", "name": "go", "parameters": {"direction": "north"}}', ""),
        (f'{{"type": "function", "function": {GO}}}', ""),
        (f'{{"tool_call": {GO}}}', ""),
        (f'{{"tool_calls": [{GO}]}}', ""),
    ],
)
def test_an_object_with_a_name_and_arguments_is_a_call_wherever_it_stands(family: str, text: str, content: str) -> None:
    assert parse(family, text) == Message("assistant", content, tool_calls=(ToolCall("call_0", "go", NORTH),))


@families
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"parameters": {}}',
        f'{{"result": {GO}}}',
        f'{{"text": "{{\\"name\\": \\"go\\", \\"parameters\\": {{}}}}", "call": {GO}}}',
        f'{{"result": {GO}',
        '[{"name": "Bob"}, {"name": "Ann"}]',
        '{"a": 1} and {"b": nothing}',
        "[]",
        "{}",
        "```json\n{}\n```",
    ],
)
def test_other_json_is_content_with_all_that_it_holds(family: str, text: str) -> None:
    assert parse(family, text) == Message("assistant", text)


@families
@pytest.mark.parametrize("between", ["; ", ";", "\n", ", ", "\n\n"])
def test_calls_may_follow_each_other(family: str, between: str) -> None:
    message = parse(family, between.join([GO, GO, GO]))
    assert [call.name for call in message.tool_calls if isinstance(call, ToolCall)] == ["go"] * 3
    assert message.content == ""


@families
def test_a_broken_call_takes_the_rest_of_the_reply(family: str) -> None:
    broken = f'{{"name": "say", "parameters": {{"text": \'x\'}}}} {GO}'
    good, bad = parse(family, f"{GO}\n{broken}").tool_calls
    assert good == ToolCall("call_0", "go", NORTH)
    assert isinstance(bad, MalformedCall)
    assert (bad.raw, bad.truncated) == (broken, False)
    assert "Write " in bad.error


@families
@pytest.mark.parametrize("arguments", ['"north"', "[1]", "true", "3"])
def test_arguments_that_are_no_object_make_a_call_malformed(family: str, arguments: str) -> None:
    message = parse(family, f'{{"name": "go", "parameters": {arguments}}} Well.')
    (call,) = message.tool_calls
    assert isinstance(call, MalformedCall)
    assert message.content == "Well."


@families
@pytest.mark.parametrize(
    "before", ["Hm.", f"Hm. {GO}", 'Hm. {"a": "', 'Hm. {"name": "go", "x": \'', '{"name": "a', "```"]
)
def test_an_end_of_reasoning_that_nothing_opened_makes_reasoning_of_all_before_it(family: str, before: str) -> None:
    go = ToolCall("call_0", "go", NORTH)
    assert parse(family, f"{before}</think>So:{GO}") == Message("assistant", "So:", before, (go,))


@families
def test_an_end_of_reasoning_in_an_argument_is_text(family: str) -> None:
    text = '{"name": "say", "arguments": {"text": "<think></think>"}}'
    say = ToolCall("call_0", "say", {"text": "<think></think>"})
    assert parse(family, text) == Message("assistant", "", tool_calls=(say,))
    assert parse(family, f"Hm.</think>{text}") == Message("assistant", "", "Hm.", (say,))


def test_only_a_call_is_valid_after_the_python_tag() -> None:
    (call,) = parse("llama3_json", "So: <|python_tag|>print(1)").tool_calls
    assert isinstance(call, MalformedCall)
    assert (call.raw, call.truncated) == ("<|python_tag|>print(1)", False)
    for cut in ("", " ", "{", '{"na'):
        (call,) = parse("llama3_json", f"<|python_tag|>{cut}").tool_calls
        assert isinstance(call, MalformedCall)
        assert call.truncated
    assert parse("llama3_json", f"So: <|python_tag|>{GO}<|eom_id|>").content == "So:"


def test_marks_around_the_lists_of_xlam_are_no_content() -> None:
    for text in (f"[TOOL_CALLS][{GO}]", f"<tool_call>[{GO}]</tool_call>", f"Hm.</think>[{GO}]"):
        message = parse("xlam", text)
        assert (message.content, len(message.tool_calls)) == ("", 1)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"response": "Hi.\\nThere."}', "Hi.\nThere."),
        ('\n{\n  "response": "Hi."\n}\n', "Hi."),
        ('{"response": {"a": 1}}', '{"a": 1}'),
        ('It said {"response": "Hi."}', 'It said {"response": "Hi."}'),
    ],
)
def test_an_answer_of_gemma_2_may_stand_in_json(text: str, content: str) -> None:
    assert parse("gemma2_generic", text) == Message("assistant", content)
