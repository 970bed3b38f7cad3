"""The text that a model reads of a tool's result, with a note for parts that are not text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentgym.errors import ToolFailure

__all__ = ["as_text"]


def as_text(result: Mapping[str, Any]) -> str:
    """Returns the result as text; raises ToolFailure if it is marked as an error.

    >>> as_text({"content": [{"type": "text", "text": "7"}], "structuredContent": {"result": 7}})
    '7'
    """
    blocks = result.get("content", ())
    parts = [_block(block) for block in blocks]
    if "structuredContent" in result and not any(block.get("type") == "text" for block in blocks):
        parts.append(json.dumps(result["structuredContent"], ensure_ascii=False))
    text = "\n".join(parts)
    if result.get("isError"):
        raise ToolFailure(text or "the tool failed, and said nothing of why")
    return text or "done"


def _block(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block["text"])
    if kind in ("image", "audio"):
        return f"[{'an' if kind[0] in 'ai' else 'a'} {kind} ({block.get('mimeType')}) was left out: only text is shown]"
    if kind == "resource_link":
        return f"[resource {block.get('name')}: {block.get('uri')}]"
    resource = block.get("resource", {})
    if kind == "resource" and "text" in resource:
        return str(resource["text"])
    return f"[{kind} ({resource.get('mimeType', 'of unknown type')}) was left out: only text is shown]"
