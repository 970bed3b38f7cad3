"""Calls that begin with a mark and end with their JSON: `<|tool_call|> [{"name": "go", "arguments": {}}] text`."""

from __future__ import annotations

import re

from agentgym.chat_templates.formats.json_text import json_span
from agentgym.chat_templates.formats.protocol import ReplyContext
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.chat_templates.formats.tagged import FoundCall, ReadBody, Tags, scan_tagged
from agentgym.types import Message

__all__ = ["OpenJson", "read_open_json"]

NOTHING = re.compile("")


def read_open_json(
    text: str, context: ReplyContext, tags: Tags, read_body: ReadBody, head: re.Pattern[str] = NOTHING
) -> Message:
    """Returns the message of a reply whose calls no tag closes, by the rules of `read_tagged`.

    `head` is what may be between the opening and the JSON; it belongs to the body. An opening that ends with a bracket
    shares it with the body.
    """
    return scan_tagged(text, context, tags, OpenJson(text, context, tags, read_body, head).take)


class OpenJson:
    """The reader of such calls in a `scan_tagged`."""

    def __init__(
        self, text: str, context: ReplyContext, tags: Tags, read_body: ReadBody, head: re.Pattern[str]
    ) -> None:
        self.text, self.context, self.tags, self.read_body, self.head = text, context, tags, read_body, head

    def take(self, reply: ReplyBuilder, start: int) -> int:
        """Adds the calls of the opening at `start`; returns where they end."""
        opening = self.tags.openings.match(self.text, start)
        begin = start if opening is None else opening.end() - opening[0].endswith(("[", "{"))
        end, is_cut = self._end(begin)
        raw = self.text[start:end]
        try:
            calls = self.read_body(self.text[begin:end], self.context)
        except ValueError as error:
            reply.add_malformed(raw, f"the call could not be read: {error}", truncated=is_cut)
            return end
        if not calls:
            reply.text(raw)
        for call in calls:
            if isinstance(call, FoundCall):
                reply.call(call.name, call.arguments, call.id)
            else:
                reply.add_malformed(call.raw, f"the call could not be read: {call.error}")
        return end

    def _end(self, begin: int) -> tuple[int, bool]:
        """Returns the body's end, and whether the reply ended in it; broken JSON ends at the next mark after it."""
        head = self.head.match(self.text, begin)
        if head is not None:
            begin, is_whole = json_span(self.text, head.end())
            if is_whole or begin == len(self.text):
                return begin, not is_whole
        following = self.tags.marks.search(self.text, begin)
        if following is not None:
            return following.start(), False
        return len(self.text), head is None
