"""Reads replies that are a sequence of addressed messages: a header, a mark, a body, and a mark that ends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentgym.chat_templates.formats.reply import ReplyBuilder

__all__ = ["AddressMarks", "Addressed", "addressed_messages", "take_without_body"]


@dataclass(frozen=True)
class AddressMarks:
    """The marks of a family: `AddressMarks("<|start|>", "<|message|>", ("<|end|>", "<|call|>"), ("<|channel|>",))`."""

    start: str
    """The mark that begins a header. The first header of a reply has none: the prompt ends after the mark."""
    message: str
    """The mark that ends a header; the body follows."""
    ends: tuple[str, ...]
    """The marks that end a body."""
    inner: tuple[str, ...] = ()
    """The marks of a header: inside a body, one of them begins the next message, whose start mark is missing."""
    any: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        texts = sorted((self.start, self.message, *self.ends, *self.inner), key=len, reverse=True)
        object.__setattr__(self, "any", re.compile("|".join(map(re.escape, texts))))


@dataclass(frozen=True, slots=True)
class Addressed:
    """One message: `Addressed(" to=user", "Hello.", " to=user<|message|>Hello.<|eot|>", is_closed=True)`."""

    header: str
    body: str | None
    """The body, or None if none follows the header: the reply is cut there, or is text without a header."""
    raw: str
    is_closed: bool
    """True if an end mark, or the next message, follows."""


def addressed_messages(text: str, marks: AddressMarks) -> Iterator[Addressed]:
    """Yields the messages of a reply in order; raises nothing, takes time linear in the text."""
    start, body = 0, None
    for match in marks.any.finditer(text):
        mark = match[0]
        if mark == marks.message:
            body = match.end() if body is None else body
            continue
        is_end = mark in marks.ends
        if not is_end and body is None and (mark != marks.start or not text[start : match.start()].strip()):
            continue
        end = match.end() if is_end else match.start()
        yield _message(text, marks, (start, body, match.start(), end), is_closed=True)
        start, body = end, None
    yield _message(text, marks, (start, body, len(text), len(text)), is_closed=False)


def take_without_body(
    reply: ReplyBuilder, message: Addressed, marks: AddressMarks, *, is_call: bool, write: str
) -> None:
    """Adds a message without a body to the reply: text without a header, or a header that the reply's end cuts.

    `is_call` is true if a header would address a tool, and `write` is how to write a call.
    """
    is_header = message.raw.startswith(marks.start) or any(mark in message.raw for mark in marks.inner)
    if is_call and (is_header or BARE_HEADER.fullmatch(message.raw)):
        reply.add_malformed(message.raw, f"the call has no arguments. {write}", truncated=not message.is_closed)
    elif not is_header:
        reply.paragraph(message.header)


def _message(text: str, marks: AddressMarks, bounds: tuple[int, int | None, int, int], *, is_closed: bool) -> Addressed:
    """Returns the message at these offsets: of its header, its body, the body's end, and its own end."""
    start, body, body_end, end = bounds
    header_end = body_end if body is None else body - len(marks.message)
    header = text[start:header_end].removeprefix(marks.start)
    return Addressed(header, None if body is None else text[body:body_end], text[start:end], is_closed)


BARE_HEADER = re.compile(r"\s*+(?:assistant\s*+)?+to=\S*+\s*+")
