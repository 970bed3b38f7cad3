"""Reads bodies of calls that are JSON: one object, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from agentgym.call_json import as_call, json_kind, read_json
from agentgym.chat_templates.formats.json_text import list_items
from agentgym.chat_templates.formats.protocol import ReplyContext
from agentgym.chat_templates.formats.tagged import FoundCall, UnreadCall
from agentgym.types import JSON

__all__ = ["JsonCalls"]

OBJECT = '{"name": "tool", "arguments": {...}}'


@dataclass(frozen=True)
class JsonCalls:
    """The form in which a family writes calls as JSON; called with a body it returns the body's calls (a `ReadBody`).

    >>> JsonCalls(listed=True)('[{"name": "go", "arguments": {"direction": "north"}}]', ReplyContext())
    [FoundCall(name='go', arguments={'direction': 'north'}, id=None)]
    """

    write: str = OBJECT
    """An example of a call, for error messages."""
    single: bool = True
    """True if a body may be one object."""
    listed: bool = False
    """True if a body may be a list of objects."""
    names: tuple[str, ...] = ("name",)
    """The keys of the name; the first that is present counts."""
    arguments: tuple[str, ...] = ("arguments",)
    """The keys of the arguments."""
    id: str = ""
    """The key of the model's own id for a call, if its template needs it back."""

    def __call__(self, body: str, context: ReplyContext) -> Sequence[FoundCall | UnreadCall]:
        """Returns the calls of a body; raises ValueError with the reason."""
        try:
            return self.of(read_json(body), body)
        except ValueError as error:
            raise ValueError(f"{error}. Write {self.write}") from None

    def of(self, value: JSON, body: str) -> Sequence[FoundCall | UnreadCall]:
        """Returns the calls of a body that was read as JSON; raises ValueError with the reason."""
        if self.listed and isinstance(value, Sequence) and not isinstance(value, str):
            return self._items(value, body)
        if not self.single:
            raise ValueError(f"calls are a JSON list, got {json_kind(value)}")
        return [self.call(value)]

    def call(self, value: JSON) -> FoundCall:
        """Returns the call that a JSON value is; raises ValueError that names what it lacks."""
        name, arguments = as_call(value, self.names, self.arguments)
        assert isinstance(value, Mapping)  # as_call refuses everything else
        call_id = value.get(self.id)
        return FoundCall(name, arguments, call_id if isinstance(call_id, str) and call_id else None)

    def _items(self, values: Sequence[JSON], body: str) -> Sequence[FoundCall | UnreadCall]:
        """Returns each item's call; adjacent unreadable items make one UnreadCall. Raises ValueError if all fail."""
        calls = [self._call_or_error(value) for value in values]
        good_calls = [call for call in calls if isinstance(call, FoundCall)]
        if len(good_calls) == len(calls):
            return good_calls
        if not good_calls:
            raise ValueError(calls[0])
        return self._among_errors(calls, body)

    def _call_or_error(self, value: JSON) -> FoundCall | str:
        try:
            return self.call(value)
        except ValueError as error:
            return str(error)

    def _among_errors(self, calls: Sequence[FoundCall | str], body: str) -> Sequence[FoundCall | UnreadCall]:
        run_items: list[FoundCall | UnreadCall] = []
        items = zip(calls, list_items(body), strict=True)
        for is_call, run in groupby(items, key=lambda item: isinstance(item[0], FoundCall)):
            if is_call:
                run_items += [call for call, _ in run if isinstance(call, FoundCall)]
                continue
            (error, (start, end)), *others = run
            end = others[-1][1][1] if others else end
            run_items.append(UnreadCall(body[start:end], f"{error}. Write {self.write}"))
        return run_items
