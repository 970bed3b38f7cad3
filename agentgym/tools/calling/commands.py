"""Reads tool calls from typed text: `<tool_call>` blocks, JSON, or `name value key=value` as a person types it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentgym.call_json import as_call, read_json
from agentgym.errors import NOT_JSON
from agentgym.types import AnyCall, MalformedCall, ToolCall, ToolSpec

__all__ = ["read_calls", "read_command", "read_tool_call_blocks"]

THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PART = re.compile(r"""([ \t\r\n]+)|((?:[^ \t\r\n"'\\]|\\.)+)|'([^']*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
"""A part of a typed line: blanks, a word without quotes, a text in single quotes, one in double quotes."""
JSON_START = re.compile(r"(?:[A-Za-z_]\w*=)?(?=[\[{])")
MAX_JSON_TRIES = 16
"""The lists and objects that a typed line is searched for: each may be looked at up to the end of the line."""
KEY_VALUE = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)


def read_calls(text: str, tools: Mapping[str, ToolSpec]) -> tuple[AnyCall, ...]:
    """Returns the calls in `text`, or () if there are none. Never raises; a broken block becomes a MalformedCall.

    >>> spec = ToolSpec("go", "", {"type": "object", "properties": {"way": {"type": "string"}}})
    >>> read_calls("go north", {"go": spec})
    (ToolCall(id='call_0', name='go', arguments={'way': 'north'}),)
    """
    return read_tool_call_blocks(text) or read_command(text, tools)


def read_tool_call_blocks(text: str) -> tuple[AnyCall, ...]:
    """Returns the `<tool_call>{json}</tool_call>` blocks outside `<think>`, numbered `call_0`, `call_1`, ..."""
    if "<tool_call>" not in text:
        return ()
    bodies = BLOCK.findall(THINKING.sub("", text))
    return tuple(_from_json(f"call_{number}", body.strip()) for number, body in enumerate(bodies))


def read_command(text: str, tools: Mapping[str, ToolSpec]) -> tuple[AnyCall, ...]:
    """Reads one call as a person types it: `{"name": ...}`, `name {"key": 1}`, `name key=1` or `name 1`; else ()."""
    text = text.strip()
    if text.startswith("{") and '"name"' in text:
        return (_from_json("call_0", text),)
    name, _, rest = text.partition(" ")
    if name not in tools:
        return ()
    rest = rest.strip()
    if rest.startswith("{"):
        return (_from_json("call_0", f'{{"name": {json.dumps(name)}, "arguments": {rest}}}'),)
    arguments = _typed_arguments(rest, tools[name].parameters)
    return (ToolCall("call_0", name, arguments),) if arguments is not None else ()


def _from_json(call_id: str, body: str) -> AnyCall:
    try:
        return ToolCall(call_id, *as_call(read_json(body)))
    except ValueError as error:
        return MalformedCall(call_id, body, f'{error}. A call is {{"name": "...", "arguments": {{...}}}}')


def _typed_arguments(rest: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    properties = dict(parameters.get("properties", {}))
    try:
        words = split_typed_words(rest)
    except ValueError:  # an apostrophe does not open a quote: "say it's me"
        words = rest.split()
    arguments: dict[str, Any] = {}
    loose: list[str] = []
    for word in words:
        match = KEY_VALUE.match(word)
        if match and match.group(1) in properties:
            arguments[match.group(1)] = _value(match.group(2), properties[match.group(1)])
        else:
            loose.append(word)
    free = [name for name in properties if name not in arguments]
    if len(free) == 1 and len(loose) > 1:
        loose = [" ".join(loose)]
    if len(loose) > len(free):
        return None
    for name, word in zip(free, loose, strict=False):
        arguments[name] = _value(word, properties[name])
    return arguments


def describe_misfit(text: str, tools: Mapping[str, ToolSpec]) -> str | None:
    """Returns what is wrong with a text that begins with a tool's name and holds no call, else None."""
    name = text.strip().partition(" ")[0]
    if name not in tools:
        return None
    parameters: Mapping[str, Any] = tools[name].parameters
    names = ", ".join(parameters.get("properties", {})) or "no arguments"
    return f"{name} takes {names}, and more words were written; quotes keep a text together"


def split_typed_words(text: str) -> list[str]:
    """Returns the words of a line, as `shlex.split` does, but in a time in proportion to its length.

    A JSON list or object is one word, as it is written. Raises ValueError for a quote that is not closed, and for a
    backslash at the end.
    """
    words: list[list[str]] = []
    end, is_open, num_json_tries = 0, False, MAX_JSON_TRIES
    while end < len(text):
        if not is_open and num_json_tries and (start := JSON_START.match(text, end)):
            num_json_tries -= 1
            if (json_end := _end_of_json(text, start.end())) is not None:
                words.append([text[end:json_end]])
                end, is_open = json_end, True
                continue
        if (match := PART.match(text, end)) is None:
            break
        end = match.end()
        blanks, plain, single, double = match.groups()
        if blanks is None and not is_open:
            words.append([])
        is_open = blanks is None
        if plain is not None:
            words[-1].append(re.sub(r"\\(.)", r"\1", plain, flags=re.DOTALL))
        elif is_open:
            words[-1].append(re.sub(r"""\\(["\\])""", r"\1", double) if single is None else single)
    if end != len(text):
        raise ValueError(f"a quote or a backslash at character {end} is not ended")
    return ["".join(parts) for parts in words]


def _end_of_json(text: str, start: int) -> int | None:
    """Returns the end of the JSON value that begins at `start` and is followed by a blank or nothing, else None."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except NOT_JSON:
        return None
    return end if text[end : end + 1].strip(" \t\r\n") == "" else None


def _value(word: str, schema: Any) -> Any:
    """Reads a typed word as a JSON value, unless the schema asks for a string."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return word
    try:
        return json.loads(word)
    except NOT_JSON:
        return word
