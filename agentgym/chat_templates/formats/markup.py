"""Calls as elements with one element per argument: `<function=go><parameter=to>north</parameter></function>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from agentgym.call_json import add_unique, as_call, read_json
from agentgym.chat_templates.formats.json_text import json_end
from agentgym.chat_templates.formats.nesting import element_marks, elements, value_ends
from agentgym.chat_templates.formats.protocol import ReplyContext
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.chat_templates.formats.schema_types import tool_named, typed_value
from agentgym.chat_templates.formats.tagged import Tags, scan_tagged
from agentgym.types import JSON, Message, ToolSpec

__all__ = ["Markup", "ReadElements", "ReadValue", "bare_value", "line_value", "read_markup", "text_value"]

ReadValue = Callable[["re.Match[str]", str, "ToolSpec | None"], JSON]
"""Returns the value of an argument, given the match of its opening, its text, and the tool that is called."""

ReadElements = Callable[[str, int, "ToolSpec | None"], "tuple[Mapping[str, JSON], int]"]
"""Returns the arguments and end of a call whose inside begins there; raises ValueError if it cannot be read.

It is for a family whose arguments are not tags with a name in them."""


def text_value(head: re.Match[str], text: str, tool: ToolSpec | None) -> JSON:
    """Returns the value by the tool's schema; without one, the text."""
    return typed_value(text, head["key"].strip(), tool)


def bare_value(head: re.Match[str], text: str, tool: ToolSpec | None) -> JSON:
    """Returns the value by the tool's schema; without one, the JSON value that the text spells, else the text."""
    return typed_value(text, head["key"].strip(), tool, bare_json=True)


def line_value(head: re.Match[str], text: str, tool: ToolSpec | None) -> JSON:
    """Returns the `text_value` of a text that is on lines of its own."""
    return text_value(head, text.removeprefix("\n").removesuffix("\n"), tool)


@dataclass(frozen=True)
class Markup:
    """The form in which a family writes calls: the marks as they are, the whole openings as patterns."""

    example: str
    """An example of a call, for a model that wrote a wrong one."""
    call: tuple[str, str]
    """The opening and closing of every call: `<function=` and `</function>`."""
    head: str
    """The pattern of the whole opening of a call, with its `name`."""
    value: tuple[str, str]
    """The opening and closing of every argument's value: `<parameter=` and `</parameter>`."""
    value_head: str
    """The pattern of all that opens an argument's value, with its `key`."""
    frames: tuple[tuple[str, str], ...] = ()
    """The marks around one call or several, such as `<tool_call>` and `</tool_call>`; they may be missing."""
    lead: str = r"\s"
    """The pattern of what may be between the opening of a frame and its call."""
    misspelled: tuple[tuple[str, str], ...] = ()
    """Openings and closings that models write in place of the right ones: a call that begins with one is malformed."""
    verbatim: str = ""
    """The pattern of what is text whatever marks it holds, such as a CDATA section."""
    thinking: tuple[str, str] = ("<think>", "</think>")
    read_value: ReadValue = text_value
    read_elements: ReadElements | None = None
    json_frames: bool = False
    """True if a frame may hold a call as JSON instead."""

    @cached_property
    def tags(self) -> Tags:
        """The tags that begin and end calls."""
        further = tuple(opening for opening, _ in (*self.frames, *self.misspelled))
        return Tags(*self.call, self.thinking, further=further)

    @cached_property
    def patterns(self) -> _Patterns:
        """The patterns that find the family's marks."""
        return _Patterns.of(self)

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that structure a reply."""
        frames = [mark for frame in self.frames for mark in frame]
        return (*self.thinking, *frames, *self.call, *self.value)


@dataclass(frozen=True)
class _Patterns:
    """The patterns that find a family's marks."""

    head: re.Pattern[str]
    value_head: re.Pattern[str]
    lead: re.Pattern[str]
    """The openings of frames, and what is between them and a call."""
    trail: re.Pattern[str]
    """The closings of frames, and the space before them."""
    stop: re.Pattern[str]
    """The latest end of a call that cannot be read: after the match (`past`), or before it."""
    elements: re.Pattern[str]
    misspelled: re.Pattern[str]
    """Openings that are no marks of the family, one after the other."""

    @classmethod
    def of(cls, markup: Markup) -> _Patterns:
        opens = "".join(f"{re.escape(opening)}|" for opening, _ in markup.frames)
        closes = "|".join(re.escape(closing) for _, closing in (*markup.frames, *markup.misspelled)) or "(?!)"
        wrong = "|".join(re.escape(opening) for opening, _ in markup.misspelled) or "(?!)"
        hidden = f"(?P<hidden>{markup.verbatim})|" if markup.verbatim else ""
        return cls(
            re.compile(markup.head),
            re.compile(markup.value_head),
            re.compile(f"(?:{opens}{markup.lead})*+"),
            re.compile(rf"(?:\s*+(?:{closes}))*+"),
            re.compile(f"{hidden}(?P<past>{re.escape(markup.call[1])}|{closes})|{markup.tags.openings.pattern}"),
            elements(markup.call, markup.value, markup.verbatim),
            re.compile(rf"(?P<first>{wrong})(?:{wrong}|\s)*+"),
        )


def read_markup(text: str, context: ReplyContext, markup: Markup) -> Message:
    """Returns the message of a reply; raises nothing, takes time linear in the text.

    A value ends where its own closing does: examples of calls and stray marks within it are text, as far as the marks
    of the call match. Where they do not, a value ends at the last of several consecutive closings, at another argument
    that begins on the next line, or at the call's closing. A call that does not close is malformed.
    """
    return scan_tagged(text, context, markup.tags, _Calls(text, context, markup).take)


class _Calls:
    """Reads the calls of one reply."""

    def __init__(self, text: str, context: ReplyContext, markup: Markup) -> None:
        self.text, self.tools, self.markup, self.patterns = text, context.tools, markup, markup.patterns
        self.fitting: Mapping[int, Sequence[int]] | None = None
        """The ends of the values of calls whose marks match; None until the first call."""

    def take(self, reply: ReplyBuilder, start: int) -> int:
        """Reads what begins with a frame or a call; returns where it ends."""
        wrong = self.patterns.misspelled.match(self.text, start)
        if wrong is not None:
            return self._keep_malformed(reply, start, wrong.end(), ValueError(f"{wrong['first']} is no mark of a call"))
        begin = self._match(self.patterns.lead, start).end()
        if not self.text.startswith(self.markup.call[0], begin):
            return self._frame(reply, start, begin)
        try:
            name, arguments, end = self._call(begin)
        except ValueError as error:
            return self._keep_malformed(reply, start, begin + len(self.markup.call[0]), error)
        reply.call(name, arguments)
        return self._match(self.patterns.trail, end).end()

    def _call(self, start: int) -> tuple[str, Mapping[str, JSON], int]:
        """Returns the name, arguments and end of a call; raises ValueError if it cannot be read."""
        head = self.patterns.head.match(self.text, start)
        name = "" if head is None else head["name"].strip()
        if head is None or not name:
            raise ValueError("no name of a tool stands where it belongs")
        tool = tool_named(name, self.tools)
        if self.markup.read_elements is not None:
            return name, *self.markup.read_elements(self.text, head.end(), tool)
        ends = iter(self._value_ends(start))
        arguments: dict[str, JSON] = {}
        position = self._match(_SPACE, head.end()).end()
        while not self.text.startswith(self.markup.call[1], position):
            value = self.patterns.value_head.match(self.text, position)
            if value is None:
                raise ValueError(f"neither an argument nor {self.markup.call[1]} stands where one belongs")
            end = next(ends, None)
            key = value["key"].strip()
            if end is None:
                end, position = self._loose_end(value.end(), (key, arguments))
            else:
                position = end + len(self.markup.value[1])
            add_unique(arguments, key, self.markup.read_value(value, self.text[value.end() : end], tool))
            position = self._match(_SPACE, position).end()
        return name, arguments, position + len(self.markup.call[1])

    def _value_ends(self, start: int) -> Sequence[int]:
        """Returns the ends of the call's values; empty if its marks do not match."""
        if self.fitting is None:
            self.fitting = value_ends(self.text, start, self.patterns.elements)
        return self.fitting.get(start, ())

    def _loose_end(self, begin: int, parameter: tuple[str, Mapping[str, JSON]]) -> tuple[int, int]:
        """Returns where a value ends and where what follows begins, in a call whose marks do not match.

        `parameter` is the argument's name and the arguments before it.
        """
        marks = element_marks(self.text, begin, self.patterns.elements)
        mark = next(marks, None)
        while mark is not None:
            following = next(marks, None)
            is_text = following is not None and following.lastgroup == "end_value"
            if mark.lastgroup == "call":
                raise ValueError("it was not closed before the next one")
            if mark.lastgroup == "end_value" and not is_text:
                return mark.start(), mark.end()
            if mark.lastgroup == "end_call" and not is_text:
                return mark.start(), mark.start()
            if mark.lastgroup == "value" and self._is_further(mark, parameter):
                return mark.start(), mark.start()
            mark = following
        raise ValueError("its last argument does not end")

    def _is_further(self, mark: re.Match[str], parameter: tuple[str, Mapping[str, JSON]]) -> bool:
        """Returns True if an argument that is not given yet begins there, on a line of its own."""
        head = self.patterns.value_head.match(self.text, mark.start())
        if head is None or self.text[mark.start() - 1] != "\n":
            return False
        return head["key"].strip() != parameter[0] and head["key"].strip() not in parameter[1]

    def _frame(self, reply: ReplyBuilder, start: int, begin: int) -> int:
        """Reads a frame that no call follows immediately."""
        if self.markup.json_frames and (end := json_end(self.text, begin)) is not None:
            try:
                reply.call(*as_call(read_json(self.text[begin:end]), ("name",), ("arguments", "parameters")))
            except ValueError as error:
                return self._keep_malformed(reply, start, end, error)
            return self._match(self.patterns.trail, end).end()
        stop = self._stop(begin)
        if stop is not None and stop[0] == self.markup.call[0]:
            reply.text(self.text[begin : stop.start()])
            return stop.start()
        return self._keep_malformed(reply, start, begin, ValueError("no call stands where one belongs"))

    def _keep_malformed(self, reply: ReplyBuilder, start: int, begin: int, error: ValueError) -> int:
        """Keeps a call that cannot be read, up to its closing or to the next call after `begin`."""
        stop = self._stop(begin)
        end = len(self.text) if stop is None else stop.start()
        if stop is not None and stop["past"]:
            end = self._match(self.patterns.trail, stop.end()).end()
        message = f"the call could not be read: {error}. Write {self.markup.example}"
        reply.add_malformed(self.text[start:end], message, truncated=stop is None)
        return end

    def _stop(self, begin: int) -> re.Match[str] | None:
        """Returns the match that ends a call that cannot be read; None if the reply's end does."""
        stops = self.patterns.stop.finditer(self.text, begin)
        return next((stop for stop in stops if stop.lastgroup != "hidden"), None)

    def _match(self, pattern: re.Pattern[str], position: int) -> re.Match[str]:
        """Returns the match of a pattern that matches everywhere, at least the empty text."""
        match = pattern.match(self.text, position)
        assert match is not None
        return match


_SPACE = re.compile(r"\s*+")
