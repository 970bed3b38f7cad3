"""The responses of an episode, to which later requests may refer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ResponseStore"]


class ResponseStore:
    """The items of an episode's responses; equal items are held once, as an agent sends its whole history each time."""

    def __init__(self) -> None:
        self._items: dict[bytes, Any] = {}
        self._by_response: dict[str, tuple[Any, ...]] = {}

    def add(self, response_id: str, items: Sequence[Any]) -> None:
        """Stores the items of a response: those of its input, then those of its output."""
        keys = [json.dumps(item, default=dict).encode() for item in items]
        self._by_response[response_id] = tuple(map(self._items.setdefault, keys, items))

    def items(self, response_id: str) -> tuple[Any, ...] | None:
        """Returns the items of a response, or None if it is not stored."""
        return self._by_response.get(response_id)

    def item(self, item_id: object) -> Mapping[str, Any] | None:
        """Returns the item with an id, or None if none has it."""
        items = (item for item in self._items.values() if isinstance(item, Mapping))
        return next((item for item in items if item.get("id") == item_id), None)

    def clear(self) -> None:
        """Forgets all."""
        self._items.clear()
        self._by_response.clear()
