"""Calls as Functionary writes them: `<function=go>{...}</function>` (v3.1), `>>>go` and a line of JSON (v3.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.call_json import read_arguments, read_json
from agentgym.chat_templates.formats.grammar import NAME, CallGrammar
from agentgym.chat_templates.formats.open_json import OpenJson
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, UnreadCall, scan_tagged
from agentgym.types import Message

__all__ = ["FUNCTIONARY"]

ADDRESS, ALL = ">>>", "all\n"
FUNCTION = "<function="
TAGS = Tags(FUNCTION, further=(ADDRESS,), silent=("</function>", ADDRESS + ALL))
HEAD = re.compile(r"(?P<name>[^\s<>{}\[\]\"=]++)(?:>|\n)\s*+(?=\{|null\b|\"\"|\Z)")
EMPTY = re.compile(rf"{FUNCTION}(?P<name>[^\s<>{{}}\[\]\"=]++)>\s*+</function>")
RECIPIENT = re.compile(r"[^\s<>{}\[\]\"=]++\n\s*+\{")


def read_functionary_body(body: str, context: ReplyContext) -> Sequence[FoundCall | UnreadCall]:
    """Returns the call of a name with arguments; raises ValueError with the reason."""
    try:
        head = HEAD.match(body)
        if head is None:
            raise ValueError("no name with JSON arguments")
        arguments = read_arguments(read_json(body[head.end() :]))
    except ValueError as error:
        raise ValueError(f"{error}. Write {FUNCTION}tool>{{...}}</function>") from None
    return [FoundCall(head["name"], arguments)]


def read_functionary(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply; a prompt of v3.2 ends with the `>>>` after which a reply begins."""
    start = text.lstrip()
    if start.startswith(ALL) or RECIPIENT.match(start):
        text = ADDRESS + start
    calls = OpenJson(text, context, TAGS, read_functionary_body, HEAD)

    def take(reply: ReplyBuilder, start: int) -> int:
        if (empty := EMPTY.match(text, start)) is not None:
            reply.call(empty["name"], {})
            return empty.end()
        after = start + len(ADDRESS)
        if text.startswith(ADDRESS, start) and not RECIPIENT.match(text, after):
            reply.text(ADDRESS)
            return after
        return calls.take(reply, start)

    return scan_tagged(text, context, TAGS, take)


FUNCTIONARY = ReplyFormat(
    "functionary",
    "Functionary v3.1 and v3.2",
    read_functionary,
    (*TAGS.thinking, FUNCTION, "</function>", ADDRESS),
    TAGS.thinking,
    ends=("<|eot_id|>", "<|eom_id|>"),
    grammar=CallGrammar(FUNCTION, f"{FUNCTION}{NAME}>", "</function>"),
)
