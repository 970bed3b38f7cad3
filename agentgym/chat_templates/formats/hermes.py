"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": "go", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.call_json import as_call, read_json
from agentgym.chat_templates.formats.grammar import TAGGED_OBJECT
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, read_tagged
from agentgym.types import Message

__all__ = ["HERMES"]

TAGS = Tags("<tool_call>", "</tool_call>", json_body=True)


def read_hermes_body(body: str, context: ReplyContext) -> Sequence[FoundCall]:
    """Returns the one call of a body that is a JSON object; raises ValueError with the reason."""
    try:
        return [FoundCall(*as_call(read_json(body)))]
    except ValueError as error:
        raise ValueError(f'{error}. Write {{"name": "tool", "arguments": {{...}}}}') from None


def read_hermes(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    return read_tagged(text, context, TAGS, read_hermes_body)


HERMES = ReplyFormat(
    "hermes",
    "Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, the embedded model",
    read_hermes,
    ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ends=("<|im_end|>",),
    aliases=("hermes_qwen25", "qwen3", "qwq", "chatml"),
    grammar=TAGGED_OBJECT,
)
