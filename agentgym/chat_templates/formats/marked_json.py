"""Families that write calls as JSON after a mark that needs no closing: `<|tool_call|> [{"name": ...}]`."""

from __future__ import annotations

from agentgym.chat_templates.formats.json_calls import JsonCalls
from agentgym.chat_templates.formats.open_json import read_open_json
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.tagged import Tags
from agentgym.types import Message

__all__ = ["MARKED_JSON"]


def marked_json(
    name: str, models: str, tags: Tags, calls: JsonCalls, marks: tuple[str, ...], ends: tuple[str, ...]
) -> ReplyFormat:
    """Returns the format of a family; `marks` are the single texts that its tags consist of."""

    def read(text: str, context: ReplyContext) -> Message:
        return read_open_json(text, context, tags, calls)

    return ReplyFormat(name, models, read, (*tags.thinking, *marks), tags.thinking, ends)


LIST = JsonCalls(single=False, listed=True, write='[{"name": "tool", "arguments": {...}}]')
OBJECT = JsonCalls()
EITHER = JsonCalls(
    listed=True,
    arguments=("arguments", "parameters"),
    write='functools[{"name": "tool", "arguments": {...}}]',
)

MARKED_JSON = (
    marked_json(
        "granite",
        "Granite 3",
        Tags("<|tool_call|>", further=("<tool_call>",), silent=("</tool_call>",)),
        LIST,
        ("<|tool_call|>", "<tool_call>", "</tool_call>"),
        ("<|end_of_text|>",),
    ),
    marked_json(
        "granite_20b_fc",
        "Granite 20B function calling",
        Tags("<function_call>"),
        OBJECT,
        ("<function_call>",),
        ("<|endoftext|>",),
    ),
    marked_json(
        "giga_chat3",
        "GigaChat 3",
        Tags(
            "<|function_call|>",
            further=("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
            silent=("<|message_sep|>",),
        ),
        OBJECT,
        ("<|function_call|>", "<|message_sep|>", "<|role_sep|>"),
        ("</s>",),
    ),
    marked_json(
        "phi4_mini",
        "Phi-4-mini",
        Tags("functools[", further=("<|tool_call|>",), silent=("<|/tool_call|>",)),
        EITHER,
        ("<|tool_call|>", "<|/tool_call|>"),
        ("<|end|>", "<|endoftext|>"),
    ),
)
