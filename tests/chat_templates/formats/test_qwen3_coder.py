"""What is Qwen3-Coder's and Seed-OSS's own way of writing calls."""

from __future__ import annotations

import pytest

from agentgym.chat_templates.formats.qwen3_coder import QWEN3_CODER, SEED_OSS
from agentgym.types import AnyCall, MalformedCall, ToolCall, ToolSpec

PROPERTIES = {"text": {"type": "string"}, "fast": {"type": "boolean"}, "to": {"type": ["string", "null"]}}
TOOL = ToolSpec("go", "", {"type": "object", "properties": PROPERTIES})


def read(text: str) -> tuple[AnyCall, ...]:
    return QWEN3_CODER.parse(text, [TOOL]).tool_calls


def test_one_line_break_at_either_side_of_a_value_is_the_formats() -> None:
    (call,) = read("<function=go>\n<parameter=text>\n\n  a\n\n</parameter>\n<parameter=to>b</parameter>\n</function>")
    assert call == ToolCall("call_0", "go", {"text": "\n  a\n", "to": "b"})


def test_pythons_spelling_of_a_value_is_read() -> None:
    (call,) = read("<function=go><parameter=fast>\nTrue\n</parameter><parameter=to>\nNone\n</parameter></function>")
    assert call == ToolCall("call_0", "go", {"fast": True, "to": None})


@pytest.mark.parametrize("end", ["", "\n</tool_call>", "\n</tool_call>\n"])
def test_a_call_needs_no_frame(end: str) -> None:
    message = QWEN3_CODER.parse(f"Let me see.\n<function=go>\n</function>{end}", [TOOL])
    assert (message.content, message.tool_calls) == ("Let me see.", (ToolCall("call_0", "go", {}),))


def test_an_unclosed_value_ends_at_a_line_that_begins_an_argument_or_ends_the_call() -> None:
    text = "<tool_call>\n<function=go>\n<parameter=text>\na\n<parameter=to>\nb\n</function>\n</tool_call>"
    assert read(text) == (ToolCall("call_0", "go", {"text": "a", "to": "b"}),)


def test_an_argument_that_is_given_already_does_not_begin_again_within_a_value() -> None:
    text = "<function=go>\n<parameter=text>\na\n<parameter=text>\n</parameter>\n</function>"
    assert read(text) == (ToolCall("call_0", "go", {"text": "a\n<parameter=text>"}),)


def test_a_function_that_its_closing_ends_at_once_has_a_name() -> None:
    assert read("<tool_call>\n<function=go\n</function>\n</tool_call>") == (ToolCall("call_0", "go", {}),)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>\n<function=go\n<parameter=to>b</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=go>\n<parameter=to>b</parameter>\n</tool_call>",
        "<tool_call>\n<function=go>\nnorth\n</function>\n</tool_call>",
    ],
)
def test_a_frame_without_a_whole_call_is_malformed_and_kept(text: str) -> None:
    broken, good = read(f"{text}<function=go></function>")
    assert isinstance(broken, MalformedCall)
    assert (broken.raw, broken.truncated) == (text, False)
    assert "<function=TOOL>" in broken.error
    assert good == ToolCall("call_1", "go", {})


def test_text_before_the_call_of_a_frame_is_content() -> None:
    message = QWEN3_CODER.parse("<tool_call>\nI go.\n<function=go>\n</function>\n</tool_call>", [TOOL])
    assert (message.content.strip(), message.tool_calls) == ("I go.", (ToolCall("call_0", "go", {}),))


def test_seeds_values_keep_their_line_breaks() -> None:
    text = "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=go>\n<parameter=text>a\n</parameter>\n</function>"
    message = SEED_OSS.parse(f"{text}\n</seed:tool_call><seed:eos>", [TOOL])
    assert message.reasoning == "Hm."
    assert message.tool_calls == (ToolCall("call_0", "go", {"text": "a\n"}),)
