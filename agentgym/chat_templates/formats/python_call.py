"""Reads calls in Python's syntax: `go(direction="north", steps=2)`, alone or in a list."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.chat_templates.formats.protocol import ReplyContext
from agentgym.chat_templates.formats.python_literal import ZERO_LED, LiteralReader, resolve_escapes
from agentgym.chat_templates.formats.schema_types import tool_named, typed_value
from agentgym.chat_templates.formats.tagged import FoundCall, UnreadCall
from agentgym.types import JSON, ToolSpec

__all__ = ["HOW_TO_WRITE", "NAME", "read_python_call", "read_python_calls"]

HOW_TO_WRITE = 'Write [tool(name="text", number=1)]'
NAME = r"[^\W\d][\w-]*+(?:\.[\w-]++)*+"
"""A tool's name: a Python name, dots and dashes allowed."""


def read_python_calls(body: str, context: ReplyContext) -> Sequence[FoundCall | UnreadCall]:
    """Returns the calls of a list, or of a sequence without brackets; an unreadable call does not affect the others.

    The result is empty for an empty list. Raises ValueError for a body that ends before a call.
    """
    reader, calls = LiteralReader(body), list[FoundCall | UnreadCall]()
    in_list, forgiving = reader.skip("["), True
    while True:
        is_closed = in_list and reader.skip("]")
        reader.space()
        start = reader.position
        if start == len(body):
            if calls or is_closed:
                return calls
            raise ValueError(f"{reader.error('a call')}. {HOW_TO_WRITE}")
        try:
            calls.append(read_python_call(reader, context.tools))
        except ValueError as error:
            wrong = reader.position
            reader.position = start
            call = _try_forgiving(reader, context.tools) if forgiving else None
            if call is not None:
                calls.append(call)
            else:
                forgiving = False  # once: it reads as far as the end of the body
                following = NEXT_CALL.search(body, wrong)
                reader.position = len(body) if following is None else following.start("next")
                raw = body[start : reader.position].rstrip(", \n")
                raw = (raw.removesuffix("]") or raw) if in_list and following is None else raw
                calls.append(UnreadCall(raw, f"{error}. {HOW_TO_WRITE}"))
        reader.skip(",")


def read_python_call(reader: LiteralReader, tools: Sequence[ToolSpec], *, forgiving: bool = False) -> FoundCall:
    """Returns the call that begins at the reader's position; raises ValueError with the reason.

    Digits that begin with a zero are a text, unless the schema in `tools` allows an integer and no text.
    `forgiving` reads a string as far as a quote that an argument, or the calls, can end with: models write shell
    commands with quotes of the same kind inside.
    """
    reader.space()
    name = reader.take(CALL_START)
    if name is None:
        raise reader.error("a call")
    arguments: dict[str, JSON] = {}
    while not reader.skip(")"):
        key = reader.take(KEYWORD)
        if key is None:
            raise reader.error("an argument's name and =")
        if key[1] in arguments:
            raise ValueError(f"the argument {key[1]} is given twice")
        text = reader.take(FORGIVING_STRING) if forgiving else None
        reader.space()
        if text is not None:
            arguments[key[1]] = resolve_escapes(text[1] if text[2] is None else text[2])
        elif (digits := reader.take(ZERO_LED)) is not None:
            arguments[key[1]] = typed_value(digits[0], key[1], tool_named(name[1], tools))
        else:
            arguments[key[1]] = reader.value()
        if not reader.skip(","):
            reader.expect(")")
            break
    return FoundCall(name[1], arguments)


def _try_forgiving(reader: LiteralReader, tools: Sequence[ToolSpec]) -> FoundCall | None:
    try:
        return read_python_call(reader, tools, forgiving=True)
    except ValueError:
        return None


CALL_START = re.compile(rf"({NAME})\s*+\(")
KEYWORD = re.compile(r"\s*+([^\W\d]\w*+)\s*+=(?!=)")
NEXT_CALL = re.compile(rf"\)[ \t]*+[,\n]\s*+(?P<next>{NAME}\s*+\()")
_CLOSES = rf"\s*+(?:,\s*+[^\W\d]\w*+\s*+=(?!=)|,?+\s*+\)\s*+(?:,\s*+{NAME}\s*+\(|\]?+\s*+\Z))"
FORGIVING_STRING = re.compile(
    rf"\s*+(?:'((?:[^'\\]++|\\.|'(?!{_CLOSES}))*+)'|\"((?:[^\"\\]++|\\.|\"(?!{_CLOSES}))*+)\")", re.DOTALL
)
