"""The embedded model's chat template, to the character."""

from __future__ import annotations

from agentgym.chat_templates import TemplateRenderer
from agentgym.types import Message, ToolCall, ToolSpec

GO = ToolSpec(
    "go",
    "Walks.",
    {
        "type": "object",
        "properties": {
            "direction": {"type": "string", "enum": ["north", "south"]},
            "steps": {"type": "integer"},
            "how": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["direction"],
    },
)
LOOK = ToolSpec("look", "Looks around.", {"type": "object", "properties": {}})
NORTH = ToolCall("call_0", "go", {"direction": "north"})

WHOLE = """\
<|im_start|>system
You play.

Tools:
go(direction: north|south, steps?: integer, how?: any)
look()
Call: <tool_call>{"name": tool, "arguments": {...}}</tool_call><|im_end|>
<|im_start|>user
Begin.<|im_end|>
<|im_start|>assistant
<think>
North?
</think>

I go.
<tool_call>
{"name": "go", "arguments": {"direction": "north"}}
</tool_call>
<tool_call>
{"name": "look", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
A wall.
</tool_response>
<tool_response>
A cave.
</tool_response><|im_end|>
<|im_start|>user
Go on.<|im_end|>
<|im_start|>assistant
"""


def test_a_conversation_with_tools_reads_like_this(renderer: TemplateRenderer) -> None:
    messages = [
        Message("system", "You play."),
        Message("user", "Begin."),
        Message("assistant", "I go.", "North?", (NORTH, ToolCall("call_1", "look", {}))),
        Message("tool", "A wall.", tool_call_id="call_0"),
        Message("tool", "A cave.", tool_call_id="call_1"),
        Message("user", "Go on."),
    ]
    assert renderer.decode(renderer.render(messages, [GO, LOOK])) == WHOLE


def test_tools_without_a_system_message_make_one(renderer: TemplateRenderer) -> None:
    assert renderer.decode(renderer.render([Message("user", "Begin.")], [LOOK])) == (
        "<|im_start|>system\nTools:\nlook()\n"
        'Call: <tool_call>{"name": tool, "arguments": {...}}</tool_call><|im_end|>\n'
        "<|im_start|>user\nBegin.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_tools_and_no_system_message_leave_the_conversation_alone(renderer: TemplateRenderer) -> None:
    text = "<|im_start|>user\nBegin.<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(renderer.render([Message("user", "Begin.")])) == text


def test_a_call_alone_starts_the_reply(renderer: TemplateRenderer) -> None:
    ids = renderer.render([Message("user", "Begin."), Message("assistant", "", tool_calls=(NORTH,))])
    call = '<tool_call>\n{"name": "go", "arguments": {"direction": "north"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in renderer.decode(ids)
