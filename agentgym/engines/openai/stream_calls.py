"""Puts the tool calls of a chat endpoint's stream together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.call_json import LABELS, keys_outside
from agentgym.errors import NOT_JSON

__all__ = ["CallDraft", "add_calls"]


@dataclass(slots=True)
class CallDraft:
    """A tool call, as far as its parts have come."""

    index: int | None
    id: str
    name: str
    pieces: list[str]
    """The text of the arguments."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """The values under keys that a call does not have, so that the message names them."""

    def ends_before(self, part: CallDraft) -> bool:
        """Returns whether the part begins another call, although the server gives it the place of this one."""
        if not part.name or not self.name:
            return False
        if part.name != self.name or (part.id and self.id and part.id != self.id):
            return True
        try:
            is_same = part.id != "" and part.id == self.id
            return not is_same and part.pieces[0][:1] == "{" and isinstance(json.loads("".join(self.pieces)), dict)
        except NOT_JSON:  # its arguments are not complete
            return False


def add_calls(calls: list[CallDraft], message: Mapping[str, Any], *, in_stream: bool) -> bool:
    """Adds the calls of a whole message, or the parts of calls in a piece of one; returns whether there are any.

    A part belongs to the call of its index, and without an index to that of its id, or to the last one. Servers that
    give all calls the same index, or none, begin the next one with a part that has a name, and another name or id, or
    arguments although the call before has all of its own. The `function_call` of the older API is a call too.
    """
    older = message.get("function_call") or {}
    parts = message.get("tool_calls") or ([{"function": older}] if any(older.values()) else [])
    for part in parts:
        function, index = part.get("function") or {}, part.get("index") if in_stream else None
        arguments = "" if function.get("arguments") in (None, {}) else function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        unknown = {k: v for k, v in function.items() if k not in ("name", "arguments", *LABELS) and v is not None}
        unknown |= {f"{key} outside of function": part[key] for key in keys_outside(part)}
        draft = CallDraft(index, part.get("id") or "", function.get("name") or "", [text], unknown)
        candidates = [call for call in calls if in_stream and (index is None or call.index in (None, index))]
        call = next(
            (call for call in candidates if draft.id and call.id == draft.id), candidates[-1] if candidates else None
        )
        if call is None or call.ends_before(draft):
            calls.append(draft)
        else:
            call.id, call.name = call.id or draft.id, call.name or draft.name
            call.pieces.append(text)
            call.unknown |= unknown
    return bool(parts)
