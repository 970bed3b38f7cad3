"""Calls as Mistral writes them: a JSON list (v3), or `[TOOL_CALLS]go[CALL_ID]123456789[ARGS]{...}` (v11).

Both may follow reasoning in `[THINK]` (v13).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.call_json import read_arguments, read_json
from agentgym.chat_templates.formats.json_calls import JsonCalls
from agentgym.chat_templates.formats.open_json import read_open_json
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, UnreadCall
from agentgym.types import Message

__all__ = ["MISTRAL"]

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINKING = ("[THINK]", "[/THINK]")
TAGS = Tags(CALLS, thinking=THINKING, further=(f"{CALLS}{CALLS}", f"{CALLS} {CALLS}"))  # a doubled mark counts once
CALL_LIST = JsonCalls(listed=True, id="id", write='[{"name": "tool", "arguments": {...}}]')
CALL_NAME = re.compile(
    r"\s*+(?P<name>[^\s\[\]{}\"]++)\s*+(?:\[CALL_ID\](?P<id>[^\s\[\]{}\"]*+)\s*+)?"
    r"(?:\[ARGS\]\s*+(?=\{|null\b|\"\")|(?=\{))"
)
BEFORE_LIST = r"[^\[{]*+(?=\[\s*+[\]{]|\{)"
HEAD = re.compile(rf"{CALL_NAME.pattern}|{BEFORE_LIST}")


def read_mistral_body(body: str, context: ReplyContext) -> Sequence[FoundCall | UnreadCall]:
    """Returns the calls after one mark: several of a list, or the one that a name begins."""
    match = CALL_NAME.match(body)
    if match is None:
        before = re.match(BEFORE_LIST, body)
        if before is None:
            raise ValueError(f"neither a list nor a name with arguments. Write {CALLS}tool{ARGS}{{...}}")
        return CALL_LIST(body[before.end() :], context)
    try:
        arguments = read_arguments(read_json(body[match.end() :]))
    except ValueError as error:
        raise ValueError(f"{error}. Write {CALLS}tool{ARGS}{{...}}") from None
    return [FoundCall(match["name"], arguments, match["id"] or None)]


def read_mistral(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    return read_open_json(text, context, TAGS, read_mistral_body, HEAD)


MISTRAL = ReplyFormat(
    "mistral",
    "Mistral and Mixtral with tools (v3 to v13, Tekken), Ministral, Magistral, Devstral",
    read_mistral,
    (*THINKING, CALLS, CALL_ID, ARGS),
    THINKING,
    ends=("</s>",),
    aliases=("mistral_v11", "mistral_v13"),
)
