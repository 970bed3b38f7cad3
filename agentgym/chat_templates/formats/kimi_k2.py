"""Calls as Kimi K2 writes them, in a section of their own, each with the id that its answer has.

`<|tool_call_begin|>functions.go:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.call_json import as_call, read_json
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, read_tagged
from agentgym.types import Message

__all__ = ["KIMI_K2"]

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
SEPARATOR = "<|tool_call_argument_begin|>"
TAGS = Tags("<|tool_call_begin|>", "<|tool_call_end|>", section=SECTION, separator=SEPARATOR)
HOW_TO_WRITE = f"Write functions.tool:0{SEPARATOR}{{...}}, and count the calls on"
CALL_ID = re.compile(r"(?:functions\.)?+(?P<name>[^\s:]++):[0-9]++")


def read_kimi_k2_body(body: str, context: ReplyContext) -> Sequence[FoundCall]:
    """Returns the call of a body; raises ValueError with the reason."""
    call_id, separator, arguments = body.partition(SEPARATOR)
    match = CALL_ID.fullmatch(call_id.strip())
    if not separator or match is None:
        raise ValueError(f"a call begins with its id and {SEPARATOR}, got {body[:40]!r}. {HOW_TO_WRITE}")
    try:
        name, values = as_call({"name": match["name"], "arguments": arguments.strip() and read_json(arguments)})
    except ValueError as error:
        raise ValueError(f"{error}. {HOW_TO_WRITE}") from None
    return [FoundCall(name, values, match[0])]


def read_kimi_k2(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    return read_tagged(text, context, TAGS, read_kimi_k2_body)


KIMI_K2 = ReplyFormat(
    "kimi_k2",
    "Kimi K2",
    read_kimi_k2,
    ("<think>", "</think>", TAGS.opening, TAGS.closing, SEPARATOR, *SECTION),
    ends=("<|im_end|>",),
)
