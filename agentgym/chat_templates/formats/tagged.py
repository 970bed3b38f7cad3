"""Reads replies whose calls are between tags, among reasoning and text: one scan for all families of that kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from agentgym.chat_templates.formats.json_text import json_end
from agentgym.chat_templates.formats.protocol import ReplyContext
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.types import JSON, Message

__all__ = ["FoundCall", "ReadBody", "Tags", "TakeCall", "UnreadCall", "read_tagged", "scan_tagged"]


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call as its body spells it: `FoundCall("go", {"direction": "north"})`."""

    name: str
    arguments: Mapping[str, JSON]
    id: str | None = None
    """The model's own id for the call."""


@dataclass(frozen=True, slots=True)
class UnreadCall:
    """A call that cannot be read, in a body with others that can: `UnreadCall("go(", "no end")`."""

    raw: str
    error: str


ReadBody = Callable[[str, ReplyContext], Sequence[FoundCall | UnreadCall]]
"""Reads the text between the tags of a call; raises ValueError that names why it cannot, and how to write it.

A body that holds no call at all, such as an empty list of them, is content, tags included."""


TakeCall = Callable[[ReplyBuilder, int], int]
"""Adds to the reply what begins with the opening tag at that offset; returns where it ends."""


@dataclass(frozen=True)
class Tags:
    """The tags of a family: `Tags("<tool_call>", "</tool_call>")`."""

    opening: str
    closing: str = ""
    """The closing tag; empty if the next opening, or the reply's end, ends a call."""
    thinking: tuple[str, str] = ("<think>", "</think>")
    silent: tuple[str, ...] = ()
    """Other marks that frame calls and are no content: `<tool_calls>` around all of them."""
    section: tuple[str, str] = ("", "")
    """Silent marks around all calls; only calls count between them, other text there is no content."""
    further: tuple[str, ...] = ()
    """Other tags that open a call."""
    json_body: bool = False
    """True if the body is one JSON value: tags in its strings are text."""
    before_json: str = ""
    """The mark between the opening tag and that value."""
    separator: str = ""
    """The mark before the arguments, which may be empty: a body that the reply's end cuts right after it is not
    complete."""
    must_close: bool = False
    """True if a body does not show where it ends: one that the reply's end leaves open is never complete."""

    @cached_property
    def openings(self) -> re.Pattern[str]:
        """Matches any tag that opens a call."""
        return _any_of([self.opening, *self.further])

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Matches any tag."""
        tags = (self.opening, *self.further, self.closing, *self.thinking, *self.silent, *self.section)
        return _any_of(tags)

    @cached_property
    def calls(self) -> re.Pattern[str]:
        """Matches the tags of calls alone."""
        return _any_of([self.opening, *self.further, self.closing])


def read_tagged(text: str, context: ReplyContext, tags: Tags, read_body: ReadBody) -> Message:
    """Returns the message of a reply; raises nothing, takes time linear in the text (given that `read_body` does).

    - A call inside reasoning is not a call. Reasoning that is never closed takes everything: if it holds a call, one
    MalformedCall from the first call on reports it.
    - A closing of reasoning that nothing opened closes reasoning which began with the reply.
    - A call that the reply's end leaves open is read if its body is complete, else malformed and truncated; a call
      that another call interrupts is malformed.
    """
    return _Scan(text, context, tags, read_body).message()


def scan_tagged(text: str, context: ReplyContext, tags: Tags, take_call: TakeCall) -> Message:
    """Returns the message of a reply by the rules of `read_tagged`, where `take_call` reads the calls."""
    return _Scan(text, context, tags, lambda body, context: [], take_call).message()


class _Scan:
    def __init__(
        self,
        text: str,
        context: ReplyContext,
        tags: Tags,
        read_body: ReadBody,
        take_call: TakeCall | None = None,
    ) -> None:
        self.text, self.context, self.tags, self.read_body = text, context, tags, read_body
        self.take_call = take_call or self._take_call
        self.reply = ReplyBuilder()
        self.position = 0
        self.section: tuple[int, int] | None = None
        """The start of the open section, and the number of calls before it."""

    def message(self) -> Message:
        if self.context.in_reasoning and self.tags.thinking[1]:
            self._reasoning()
        while (match := self.tags.marks.search(self.text, self.position)) is not None:
            before = self.text[self.position : match.start()]
            self.position = match.end()
            self._take(match, before)
        self._text(self.text[self.position :])
        self._end_section(len(self.text), truncated=True)
        return self.reply.message()

    def _take(self, match: re.Match[str], before: str) -> None:
        mark, (think, end_think) = match[0], self.tags.thinking
        if mark == end_think and not self.reply.reasonings:
            self.reply.forget()
            self.section = None
            self.reply.reason(self.text[: match.start()])
            return
        if before:
            self._text(before)
        if mark == self.tags.opening or mark in self.tags.further:
            self.position = self.take_call(self.reply, match.start())
        elif mark == think:
            self._reasoning()
        elif mark in self.tags.section:
            self._end_section(match.end())
            if mark == self.tags.section[0]:
                self.section = match.start(), len(self.reply.calls)
        elif mark not in self.tags.silent:
            self._text(mark)

    def _text(self, text: str) -> None:
        if self.section is None:
            self.reply.text(text)

    def _end_section(self, end: int, *, truncated: bool = False) -> None:
        """Closes the open section; one that holds text, yet no call, was meant as a call."""
        if self.section is None:
            return
        (start, num_calls), self.section = self.section, None
        opening, closing = self.tags.section
        raw = self.text[start:end]
        if len(self.reply.calls) == num_calls and raw.removeprefix(opening).removesuffix(closing).strip():
            error = f"no call stands behind {opening}; a call begins with {self.tags.opening}"
            self.reply.add_malformed(raw, error, truncated=truncated)

    def _reasoning(self) -> None:
        think, end_think = self.tags.thinking
        while self.text.startswith(think, self.position):  # a repeated opening counts once
            self.position += len(think)
        end = self.text.find(end_think, self.position)
        if end < 0:
            self._unclosed_reasoning(end_think)
            return
        self.reply.reason(self.text[self.position : end])
        self.position = end + len(end_think)

    def _unclosed_reasoning(self, end_think: str) -> None:
        rest = self.text[self.position :]
        self.reply.drop_text()
        self.reply.reason(rest)
        opening = self.tags.openings.search(rest)
        if opening is not None:
            error = f"the call stands inside reasoning that was never closed; write {end_think} before calling"
            self.reply.add_malformed(rest[opening.start() :], error)
        self.position = len(self.text)

    def _take_call(self, reply: ReplyBuilder, start: int) -> int:
        self._call(start)
        return self.position

    def _call(self, start: int) -> None:
        """Reads the call whose opening tag begins at `start` and ends at the current position."""
        begin, end = self.position, self._body_end(self.position)
        try:
            calls = self._close(begin, end)
        except ValueError as error:
            longer = json_end(self.text, self._json_start(begin)) if self.tags.json_body else None
            try:
                if longer is None or longer <= end:
                    raise
                calls = self._close(begin, self._body_end(longer))
            except ValueError:
                self._close_unread(start, end, error)
                return
        self._add(calls, start)

    def _json_start(self, begin: int) -> int:
        """Returns where the JSON of a body begins: after the mark that precedes it, if the family has one."""
        mark = self.tags.before_json
        head = re.compile(rf"\s*+{re.escape(mark)}").match(self.text, begin) if mark else None
        return begin if head is None else head.end()

    def _add(self, calls: Sequence[FoundCall | UnreadCall], start: int) -> None:
        """Adds a body's calls; the body ends at the current position, and its call began at `start`."""
        if not calls:
            self._text(self.text[start : self.position])
        for number, call in enumerate(calls, 1):
            if isinstance(call, FoundCall):
                self.reply.call(call.name, call.arguments, call.id)
            else:
                error = f"the call could not be read: {call.error}"
                self.reply.add_malformed(call.raw, error, truncated=number == len(calls) and self._is_cut())

    def _is_cut(self) -> bool:
        """Returns True if the reply ended in the body that was read last."""
        closing = self.tags.closing
        return self.position == len(self.text) and not (closing and self.text.endswith(closing))

    def _close(self, begin: int, end: int) -> Sequence[FoundCall | UnreadCall]:
        """Returns the calls of a body and moves past its closing tag; raises ValueError if it cannot be read."""
        closing, text = self.tags.closing, self.text
        if closing and end < len(text) and not text.startswith(closing, end):
            raise ValueError(f"it was not closed with {closing} before the next one")
        mark = self.tags.separator
        if end == len(text) and (self.tags.must_close or (mark and text.rstrip().endswith(mark))):
            raise ValueError(f"it was not closed with {closing}")
        calls = self.read_body(text[begin:end], self.context)
        self.position = end + len(closing) if end < len(text) else end
        return calls

    def _close_unread(self, start: int, end: int, error: ValueError) -> None:
        closed = self.text.startswith(self.tags.closing, end)
        self.position = end + (len(self.tags.closing) if closed else 0)
        raw = self.text[start : self.position]
        self.reply.add_malformed(raw, f"the call could not be read: {error}", truncated=end == len(self.text))

    def _body_end(self, begin: int) -> int:
        """Returns the body's end: at the next opening or closing tag, or with the reply."""
        match = self.tags.calls.search(self.text, begin)
        return len(self.text) if match is None else match.start()


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)))
