"""Calls as MiniMax M3 writes them: every tag after the mark `]<]minimax[>[`, a nested element for each argument.

A list's values are `<item>` elements; a value within a value is an element within its element. Tags without the mark
are text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from agentgym.call_json import add_unique
from agentgym.chat_templates.formats.markup import Markup, read_markup
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.formats.schema_types import ITEM, kinds_at, typed_at
from agentgym.types import JSON, ToolSpec

__all__ = ["MINIMAX_M3"]


@dataclass(slots=True)
class _Element:
    """An element that is being read: its path in the arguments, and its content so far."""

    path: tuple[str, ...] = ()
    text: list[str] = field(default_factory=list)
    inner: list[tuple[str, JSON]] = field(default_factory=list)

    def value(self, tool: ToolSpec | None) -> JSON:
        """Returns a list, an object, or the value that the text spells."""
        kinds = kinds_at(self.path, tool)
        text = "".join(self.text)
        if not self.inner and (text.strip() or not kinds & {"array", "object"} or "string" in kinds):
            return typed_at(text, self.path, tool, bare_json=True)
        if "array" in kinds or ("object" not in kinds and all(tag == ITEM for tag, _ in self.inner)):
            self.only_elements()
            return [value for _, value in self.inner]
        return self.members()

    def members(self) -> Mapping[str, JSON]:
        """Returns the inner elements as an object."""
        self.only_elements()
        values: dict[str, JSON] = {}
        for tag, value in self.inner:
            add_unique(values, tag, value)
        return values

    def only_elements(self) -> None:
        """Raises ValueError if there is text besides the elements."""
        if "".join(self.text).strip():
            raise ValueError(f"text stands beside the arguments or within <{'.'.join(self.path) or 'invoke'}>")


def read_elements(text: str, begin: int, tool: ToolSpec | None) -> tuple[Mapping[str, JSON], int]:
    """Returns the arguments and end of a call whose inside begins there; raises ValueError if it cannot be read."""
    stack = [_Element()]
    position = begin
    for mark in ELEMENT.finditer(text, begin):
        stack[-1].text.append(text[position : mark.start()])
        position, tag = mark.end(), mark["tag"]
        if not mark["closes"]:
            if tag in RESERVED:
                raise ValueError("it was not closed before the next one")
            if len(stack) > MAX_DEPTH:
                raise ValueError(f"its arguments are nested deeper than {MAX_DEPTH}")
            stack.append(_Element((*stack[-1].path, tag)))
        elif len(stack) == 1:
            if tag != "invoke":
                raise ValueError(f"</{tag}> closes nothing")
            return stack[0].members(), position
        else:
            element = stack.pop()
            if element.path[-1] != tag:
                raise ValueError(f"<{element.path[-1]}> is closed by </{tag}>")
            stack[-1].inner.append((tag, element.value(tool)))
    raise ValueError("it does not end")


MARK = "]<]minimax[>["
MAX_DEPTH = 30
RESERVED = ("invoke", "tool_call")
ELEMENT = re.compile(rf"{re.escape(MARK)}<(?P<closes>/?+)(?P<tag>[^<>\s/]++)[^<>]*+>")
M3 = Markup(
    example=f'{MARK}<tool_call>\n{MARK}<invoke name="TOOL">{MARK}<NAME>VALUE{MARK}</NAME>{MARK}</invoke>\n'
    f"{MARK}</tool_call>",
    call=(f"{MARK}<invoke name=", f"{MARK}</invoke>"),
    head=rf"""{re.escape(MARK)}<invoke name=(?P<quote>["']?+)(?P<name>[^<>"'\n]++)(?P=quote)\s*+>""",
    value=(f"{MARK}<", f"{MARK}</"),
    value_head="(?!)",
    frames=((f"{MARK}<tool_call>", f"{MARK}</tool_call>"),),
    thinking=("<mm:think>", "</mm:think>"),
    read_elements=read_elements,
)
MINIMAX_M3 = ReplyFormat(
    "minimax_m3",
    "MiniMax M3",
    partial(read_markup, markup=M3),
    (*M3.thinking, MARK),
    M3.thinking,
    ends=("[e~[",),
)
