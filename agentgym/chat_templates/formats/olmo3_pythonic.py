"""Calls as Olmo 3 writes them, one per line: `<function_calls>go(direction="north")</function_calls>`."""

from __future__ import annotations

from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.python_call import read_python_calls
from agentgym.chat_templates.formats.tagged import Tags, read_tagged
from agentgym.types import Message

__all__ = ["OLMO3_PYTHONIC"]

TAGS = Tags("<function_calls>", "</function_calls>")


def read_olmo3_pythonic(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    return read_tagged(text, context, TAGS, read_python_calls)


OLMO3_PYTHONIC = ReplyFormat(
    "olmo3_pythonic",
    "Olmo 3",
    read_olmo3_pythonic,
    ("<think>", "</think>", "<function_calls>", "</function_calls>"),
    ends=("<|im_end|>",),
)
