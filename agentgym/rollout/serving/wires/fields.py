"""Reads the fields that the dialects of agents share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.openai_wire import WireError

__all__ = ["read_list", "read_max_tokens", "read_stops", "read_text"]


def read_list(value: object, where: str) -> Sequence[Any]:
    """Returns a list, empty for null; raises WireError."""
    if not isinstance(value, list | None):
        raise WireError(f"{where} is a list, got {type(value).__name__}", where)
    return value or []


def read_text(content: object, where: str, joint: str = "\n") -> str:
    """Returns the text of a content, a text or a list of parts with text; raises WireError that names any other."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(read_list(content, where)):
        text = _part_text(part) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise WireError(f"{where}[{index}] is a part of the type {kind!r:.60}: only text is supported", where)
        texts.append(text)
    return joint.join(texts)


def read_max_tokens(fields: Mapping[str, object], *names: str) -> int | None:
    """Returns the first of the fields that is there, a whole number of at least 1; raises WireError."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WireError(f"{name} is a whole number of at least 1, got {value!r:.60}", name)
            return value
    return None


def read_stops(stop: object, name: str) -> tuple[str, ...]:
    """Returns stop strings, given as one text or a list; raises WireError."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise WireError(f"{name} is a text or a list of texts, none of them empty, got {stop!r:.60}", name)
    return tuple(stops)


def _part_text(part: Mapping[str, Any]) -> object:
    """Returns the text of a part, of whatever kind that has one; anything else than a text if it has none."""
    kind = part.get("type")
    if kind == "tool_reference":  # what Claude Code's search of tools has found
        return part.get("tool_name")
    if kind == "document":
        source = part.get("source")
        return source.get("data") if isinstance(source, Mapping) and source.get("type") == "text" else None
    if kind == "search_result":
        texts = (part.get("title"), part.get("source"), read_text(part.get("content"), "search_result.content"))
        return "\n".join(text for text in texts if isinstance(text, str))
    return part.get("text", part.get("refusal"))
