"""Replies as Muse Glimmer writes them: messages to `self` (reasoning), to `user` (content), and to tools (calls).

` to=go<|message|><atem:function_calls>`, an `<atem:invoke name="go">` with its parameters, `</atem:function_calls>`
and `<|eom|>`. A reply begins right after `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from agentgym.chat_templates.formats.addressed import Addressed, AddressMarks, addressed_messages, take_without_body
from agentgym.chat_templates.formats.invoke import invokes
from agentgym.chat_templates.formats.markup import bare_value, read_markup
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.types import Message, ToolCall, ToolSpec

__all__ = ["MUSE_GLIMMER"]

MARKS = AddressMarks("<|start|>", "<|message|>", ("<|eom|>", "<|eot|>"))
CALLS = replace(
    invokes("atem:", ("<atem:function_calls>", "</atem:function_calls>")), thinking=("", ""), read_value=bare_value
)
HOW_TO_WRITE = f"Write to=TOOL{MARKS.message}{CALLS.example}<|eom|>"
RECIPIENT = re.compile(r"\s*+(?:assistant\s++)?+to=(\S*+)\s*+")


def read_muse_glimmer(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    reply = ReplyBuilder()
    for message in addressed_messages(text, MARKS):
        recipient = RECIPIENT.fullmatch(message.header)
        name = "user" if recipient is None else recipient[1]
        if message.body is None:
            take_without_body(reply, message, MARKS, is_call=name not in ("user", "self"), write=HOW_TO_WRITE)
        elif name == "self":
            reply.reason(message.body)
        elif name == "user":
            reply.paragraph(message.body)
        else:
            _calls(reply, message, context)
    return reply.message()


def _calls(reply: ReplyBuilder, message: Addressed, context: ReplyContext) -> None:
    """Adds the calls of a message to a tool."""
    calls = read_markup(message.body or "", ReplyContext(context.tools), CALLS).tool_calls
    for call in calls:
        if isinstance(call, ToolCall):
            reply.call(_tool_name(call.name, context.tools), call.arguments)
        else:
            reply.add_malformed(call.raw, call.error, truncated=call.truncated and not message.is_closed)
    if not calls:
        error = f"no call stands in a message to a tool. {HOW_TO_WRITE}"
        reply.add_malformed(message.raw, error, truncated=not message.is_closed)


def _tool_name(name: str, tools: Sequence[ToolSpec]) -> str:
    """Returns the name of the tool meant: the template shows `go` as the namespace `go.*`, and models write `go.go`."""
    names = {tool.name for tool in tools}
    first, _, rest = name.partition(".")
    return first if name not in names and first == rest and first in names else name


MUSE_GLIMMER = ReplyFormat(
    "muse_glimmer",
    "Muse Glimmer",
    read_muse_glimmer,
    (MARKS.start, MARKS.message, *MARKS.ends, *filter(None, CALLS.marks)),
    (" to=self<|message|>", "<|eom|>"),
    ends=("<|eot|>",),
)
