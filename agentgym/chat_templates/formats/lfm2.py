"""Calls as LFM2 writes them: `<|tool_call_start|>[go(direction="north")]<|tool_call_end|>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.call_json import as_call, read_json
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.python_call import read_python_calls
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, UnreadCall, read_tagged
from agentgym.types import Message

__all__ = ["LFM2"]

TAGS = Tags("<|tool_call_start|>", "<|tool_call_end|>")


def read_lfm2_body(body: str, context: ReplyContext) -> Sequence[FoundCall | UnreadCall]:
    """Returns the calls of a body: a list in Python's syntax, or in JSON, which the models can be asked to write."""
    if not body.lstrip("[ \n").startswith("{"):
        return read_python_calls(body, context)
    value = read_json(body)
    return [FoundCall(*as_call(call)) for call in (value if isinstance(value, list) else [value])]


def read_lfm2(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    return read_tagged(text, context, TAGS, read_lfm2_body)


LFM2 = ReplyFormat(
    "lfm2",
    "LFM2, LFM2.5",
    read_lfm2,
    ("<think>", "</think>", "<|tool_call_start|>", "<|tool_call_end|>"),
    ends=("<|im_end|>",),
    aliases=("lfm2_5",),
)
