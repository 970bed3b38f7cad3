"""Calls without marks of their own, as Llama 4 and Llama 3.2 write them: `[go(direction="north"), look()]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.python_call import HOW_TO_WRITE, NAME, read_python_call
from agentgym.chat_templates.formats.python_literal import LiteralReader
from agentgym.chat_templates.formats.quoted_values import without_quotes
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.chat_templates.formats.schema_types import tool_named
from agentgym.chat_templates.formats.tagged import FoundCall
from agentgym.types import Message, ToolSpec

__all__ = ["PYTHONIC"]

THINKING = ("<think>", "</think>")
SILENT = re.compile(r"<\|python_(?:start|end)\|>")
LIST = re.compile(rf"\[\s*+(?={NAME}\s*+\()")


def read_pythonic(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply; raises nothing, takes time linear in the text.

    A list of calls counts wherever it is. One that cannot be read is a malformed call if it begins a line, and
    otherwise text that happens to look like one. Quotes that Llama 4's template puts around every value, and leaves as
    they are within one, are read by the tool's schema and the reply's end, in the last list alone.
    """
    reply = ReplyBuilder()
    begin = position = _reasoning(text, context, reply)
    while (match := LIST.search(text, position)) is not None:
        scan = _read_list(text, match.end(), context.tools)
        # The next search begins where this one went wrong, so that no text is read twice.
        position = scan.end
        if scan.error is not None and LIST.search(text, match.end()) is None and text.rstrip().endswith("]"):
            forgiven = _read_list(text, match.end(), context.tools, forgiving=True)
            if forgiven.error is None and not text[forgiven.end :].strip():
                scan, position = forgiven, forgiven.end
        if scan.error is not None and not _begins_line(text, begin, match.start()):
            continue
        reply.text(SILENT.sub("", text[begin : match.start()]))
        for call in scan.calls:
            reply.call(call.name, without_quotes(call.arguments, tool_named(call.name, context.tools)))
        if scan.error is not None:
            position = _line_end(text, position)
            raw, error = (text[scan.read_end : position], f"the call could not be read: {scan.error}. {HOW_TO_WRITE}")
            if raw.strip(", \n"):  # a list that lacks its end alone is a list
                is_cut = position == len(text) and not (scan.end < len(text) and raw.rstrip().endswith("]"))
                reply.add_malformed(raw, error, truncated=is_cut)
        begin = position
    reply.text(SILENT.sub("", text[begin:]))
    return reply.message()


@dataclass(frozen=True)
class _FoundList:
    calls: Sequence[FoundCall]
    read_end: int
    """The offset after the last call that could be read."""
    end: int
    """The offset after the list, or where it goes wrong."""
    error: ValueError | None


def _read_list(text: str, start: int, tools: Sequence[ToolSpec], *, forgiving: bool = False) -> _FoundList:
    """Returns the calls of a list from after its bracket on, as far as they can be read.

    `forgiving` is as in `read_python_call`.
    """
    reader, calls, read_end = LiteralReader(text, start), list[FoundCall](), start
    try:
        while not reader.skip("]"):
            calls.append(read_python_call(reader, tools, forgiving=forgiving))
            read_end = reader.position
            if not reader.skip(","):
                reader.expect("]")
                break
    except ValueError as error:
        return _FoundList(calls, read_end, reader.position, error)
    return _FoundList(calls, read_end, reader.position, None)


def _begins_line(text: str, begin: int, end: int) -> bool:
    while end > begin and text[end - 1] in " \t":
        end -= 1
    return end == begin or text[end - 1] == "\n" or text.endswith("<|python_start|>", begin, end)


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _reasoning(text: str, context: ReplyContext, reply: ReplyBuilder) -> int:
    """Adds the reasoning that a reply begins with; returns where what follows it begins."""
    think, end_think = THINKING
    start = len(text) - len(text.lstrip())
    is_opened = text.startswith(think, start)
    start = start + len(think) if is_opened else 0
    end = text.find(end_think, start)
    if end < 0 and not is_opened and not context.in_reasoning:
        return 0
    reply.reason(text[start:] if end < 0 else text[start:end])
    if end >= 0:
        return end + len(end_think)
    if (call := LIST.search(text, start)) is not None:
        error = f"the call stands inside reasoning that was never closed; write {end_think} before calling"
        reply.add_malformed(text[call.start() :], error)
    return len(text)


PYTHONIC = ReplyFormat(
    "pythonic",
    "Llama 4, Llama 3.2 asked for Python calls, ToolACE",
    read_pythonic,
    (*THINKING, "<|python_start|>", "<|python_end|>"),
    ends=("<|eot|>", "<|eom|>", "<|eot_id|>", "<|eom_id|>"),
    aliases=("llama4_pythonic",),
)
