"""Calls as K2 Horizon writes them: in a section, with a key and a value for each argument, or as JSON.

`<ifm|tool_call>go<ifm|arg_key>to</ifm|arg_key><ifm|arg_value>north</ifm|arg_value></ifm|tool_call>`, where an
`<ifm|arg_type>` may precede the value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from agentgym.call_json import add_unique, as_call, read_json
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.schema_types import tool_named, typed_value
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, read_tagged
from agentgym.types import JSON, Message, ToolSpec

__all__ = ["K2_HORIZON"]


def _element(name: str) -> tuple[str, str]:
    return f"<ifm|{name}>", f"</ifm|{name}>"


HOW_TO_WRITE = (
    "Write <ifm|tool_call>tool, for each argument <ifm|arg_key>name</ifm|arg_key><ifm|arg_value>value</ifm|arg_value>, "
    "and </ifm|tool_call>"
)
THINKING = tuple(_element(name) for name in ("think", "think_fast", "think_faster"))
"""The template opens one of them, by the requested effort."""
TAGS = Tags(*_element("tool_call"), thinking=THINKING[0], section=_element("tool_calls"), must_close=True)
ARGUMENT = re.compile(
    r"\s*+<ifm\|arg_key>(?P<key>[^<]++)</ifm\|arg_key>"
    r"\s*+(?:<ifm\|arg_type>(?P<type>[^<]*+)</ifm\|arg_type>\s*+)?+"
    r"<ifm\|arg_value>(?P<value>(?:[^<]++|<(?!/ifm\|arg_value>))*+)</ifm\|arg_value>\s*+"
)
NAME = re.compile(r'\s*+([^<>\s{}"]++)\s*+')
THINKING_MARK = re.compile("|".join(re.escape(mark) for pair in THINKING for mark in pair))


def read_k2_horizon_body(body: str, context: ReplyContext) -> Sequence[FoundCall]:
    """Returns the call of a body; raises ValueError with the reason."""
    try:
        if body.lstrip().startswith("{"):
            return [FoundCall(*as_call(read_json(body)))]
        if (name := NAME.match(body)) is None:
            raise ValueError("no name of a tool stands where it belongs")
        tool = tool_named(name[1], context.tools)
        arguments: dict[str, JSON] = {}
        position = name.end()
        while position < len(body):
            if (match := ARGUMENT.match(body, position)) is None:
                raise ValueError(f"expected an argument, got {body[position : position + 40]!r}")
            key, value, kind = match["key"].strip(), match["value"], (match["type"] or "").strip()
            typed = ToolSpec("", "", {"properties": {key: {"type": kind}}}) if kind else tool
            add_unique(arguments, key, typed_value(value, key, typed, bare_json=True))
            position = match.end()
    except ValueError as error:
        raise ValueError(f"{error}. {HOW_TO_WRITE}") from None
    return [FoundCall(name[1], arguments)]


def read_k2_horizon(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply; the first mark of reasoning decides which pair is in use."""
    mark = THINKING_MARK.search(text)
    pair = THINKING[0] if mark is None else next(pair for pair in THINKING if mark[0] in pair)
    return read_tagged(text, context, replace(TAGS, thinking=pair), read_k2_horizon_body)


MARKS = tuple(
    mark for name in ("tool_calls", "tool_call", "arg_key", "arg_type", "arg_value") for mark in _element(name)
)
K2_HORIZON = ReplyFormat(
    "k2_horizon",
    "K2 Horizon",
    read_k2_horizon,
    (*(mark for pair in THINKING for mark in pair), *MARKS),
    THINKING[0],
    ends=("<|ifm|im_end|>",),
)
