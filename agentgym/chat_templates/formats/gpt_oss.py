"""Replies as gpt-oss writes them (Harmony): messages on the channels analysis, commentary and final.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, what is on the other channels is content, and a message to a
function is a call: `<|start|>assistant<|channel|>commentary to=functions.go <|constrain|>json<|message|>{...}<|call|>`.
The recipient may be before the channel too. A reply begins right after `<|start|>assistant`.
"""

from __future__ import annotations

import re

from agentgym.call_json import as_call, read_json
from agentgym.chat_templates.formats.addressed import (
    Addressed,
    AddressMarks,
    addressed_messages,
    take_without_body,
)
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.types import Message

__all__ = ["GPT_OSS"]

CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
MARKS = AddressMarks("<|start|>", "<|message|>", ("<|end|>", "<|call|>", "<|return|>"), (CHANNEL,))
HOW_TO_WRITE = f"Write {CHANNEL}commentary to=functions.tool {CONSTRAIN}json<|message|>{{...}}<|call|>"
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]++)")
FUNCTIONS = "functions."
PEOPLE = ("user", "all", "assistant")
"""Recipients that are no tools."""


def read_gpt_oss(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    reply = ReplyBuilder()
    for message in addressed_messages(text, MARKS):
        role, _, channel = message.header.partition(CHANNEL)
        is_ours = not role.strip() or role.split()[0] == "assistant" or role.lstrip().startswith("to=")
        recipient = RECIPIENT.search(role) or RECIPIENT.search(channel)
        name = recipient[1] if is_ours and recipient is not None and recipient[1] not in PEOPLE else None
        if message.body is None:
            take_without_body(reply, message, MARKS, is_call=name is not None, write=HOW_TO_WRITE)
        elif name is not None:
            _call(reply, name.removeprefix(FUNCTIONS), message)
        elif is_ours and channel.split()[:1] == ["analysis"]:
            reply.reason(message.body)
        else:
            reply.paragraph(message.body)
    return reply.message()


def _call(reply: ReplyBuilder, name: str, message: Addressed) -> None:
    body = (message.body or "").strip()
    try:
        # A function without arguments may have an empty body, but a body that the reply's end cuts may not.
        arguments = {} if not body and message.is_closed else read_json(body)
        reply.call(*as_call({"name": name, "arguments": arguments}))
    except ValueError as error:
        error_text = f"the call could not be read: {error}. {HOW_TO_WRITE}"
        reply.add_malformed(message.raw, error_text, truncated=not message.is_closed)


GPT_OSS = ReplyFormat(
    "gpt_oss",
    "gpt-oss",
    read_gpt_oss,
    ("<|start|>", CHANNEL, CONSTRAIN, "<|message|>", "<|end|>", "<|call|>"),
    (f"{CHANNEL}analysis<|message|>", "<|end|>"),
    ends=("<|return|>",),
)
