"""`agentgym tools parse`: parses replies on standard input, a JSON object a line, into their calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.cli.options import parse_options
from agentgym.errors import NOT_JSON, ConfigError
from agentgym.openai_wire import WireError, tool_from_openai
from agentgym.types import JSON, MalformedCall, Message, ToolCall, ToolSpec

__all__ = ["main"]

EXAMPLE = '{"text": "...", "tools": [...]}'


@dataclass(frozen=True, kw_only=True)
class ParseOptions:
    """Reads replies, one JSON object {"text", "tools"} a line on standard input, and writes what each one contains.

    The output is one object a line: {"content", "reasoning", "tool_calls": [{"name", "arguments"}], "malformed":
    [{"raw", "error", "truncated"}]}. "tools" are OpenAI's objects, or their "function" alone; they may be left out. A
    row has "in_reasoning": true if the prompt already opened the reasoning.
    """

    family: Annotated[str, tyro.conf.arg(metavar="F")]
    """The format of the replies: a name or an alias that `agentgym tools families` shows."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One reply: a line of the input."""

    text: str
    tools: tuple[ToolSpec, ...]
    in_reasoning: bool


def main(args: Sequence[str]) -> int:
    """Runs `agentgym tools parse ...`."""
    options = parse_options(ParseOptions, args, prog="agentgym tools parse")
    reply_format: ReplyFormat = FORMATS[options.family]
    for row in _rows():
        message = reply_format.parse(row.text, row.tools, in_reasoning=row.in_reasoning)
        # flushed, as a caller may wait for each line
        print(json.dumps(_message_json(message), allow_nan=False, default=dict), flush=True)
    return 0


def _rows() -> Iterator[_Row]:
    """Yields the rows of standard input; raises ConfigError, which names the line, for the first invalid one."""
    lines = getattr(sys.stdin, "buffer", sys.stdin)  # bytes: JSON is UTF-8 whatever the locale
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _row(json.loads(line))
        except NOT_JSON as error:
            expectation = f"one JSON object a line was wanted, {EXAMPLE}"
            raise ConfigError(f"line {number} of standard input cannot be read: {error}; {expectation}") from None
        yield row


def _row(value: object) -> _Row:
    if not isinstance(value, Mapping):
        raise ValueError("it is not a JSON object")
    text, tools, in_reasoning = value.get("text"), value.get("tools"), value.get("in_reasoning", False)
    if not isinstance(text, str):
        raise ValueError('"text" is missing' if "text" not in value else '"text" is not a string')
    if tools is not None and not isinstance(tools, list):
        raise ValueError('"tools" is not a list')
    if not isinstance(in_reasoning, bool):
        raise ValueError('"in_reasoning" is neither true nor false')
    return _Row(text, tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())), in_reasoning)


def _tool(value: object, where: str) -> ToolSpec:
    is_bare = isinstance(value, Mapping) and "function" not in value and "name" in value
    try:
        return tool_from_openai({"function": value} if is_bare else value, where)
    except WireError as error:
        raise ValueError(str(error)) from None


def _message_json(message: Message) -> dict[str, JSON]:
    calls: list[JSON] = []
    malformed: list[JSON] = []
    for call in message.tool_calls:
        if isinstance(call, ToolCall):
            calls.append({"name": call.name, "arguments": call.arguments})
        elif isinstance(call, MalformedCall):
            malformed.append({"raw": call.raw, "error": call.error, "truncated": call.truncated})
    return {
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "malformed": malformed,
    }
