"""Reads values that a template writes between quotes whatever their type: `go(steps="3", stops="['a', 'b']")`."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.chat_templates.formats.python_literal import LiteralReader
from agentgym.chat_templates.formats.schema_types import kinds_at, kinds_of, typed_value
from agentgym.types import JSON, ToolSpec

__all__ = ["without_quotes"]


def without_quotes(arguments: Mapping[str, JSON], tool: ToolSpec | None) -> Mapping[str, JSON]:
    """Returns the arguments; a text becomes the value that it spells if the tool's schema allows that and no text.

    Everything else stays as the model wrote it, so that validation reports it. Values are Python's or JSON's.

    >>> tool = ToolSpec("go", "", {"type": "object", "properties": {"steps": {"type": "integer"}}})
    >>> without_quotes({"steps": "3", "to": "3"}, tool), without_quotes({"steps": "few"}, tool)
    ({'steps': 3, 'to': '3'}, {'steps': 'few'})
    """
    if tool is None:
        return arguments
    return {name: _spelled_value(value, name, tool) for name, value in arguments.items()}


def _spelled_value(value: JSON, name: str, tool: ToolSpec) -> JSON:
    kinds = kinds_at((name,), tool)
    if not isinstance(value, str) or not kinds or "string" in kinds:
        return value
    typed = typed_value(value, name, tool)
    if not isinstance(typed, str):
        return typed
    reader = LiteralReader(value)
    try:
        spelled = reader.value()
    except ValueError:
        return value
    reader.space()
    return spelled if reader.position == len(value) and kinds & kinds_of(spelled) else value
