"""The types of an episode's stored fields: a file from elsewhere may hold any JSON in their place."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["NO_EPISODE", "check_fields", "check_numbers", "check_stored_ids"]

NO_EPISODE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The errors of reading a line that is not an episode."""
MAX_DEPTH = 200
BIGGEST = 2**63
NUMBER, TEXT, MAYBE, PLAIN = (bool, int, float), (str,), (str, type(None)), (dict,)
_ANSWER = {"error": MAYBE, **dict.fromkeys(("call_id", "name", "content"), TEXT)}
_CALL = {"arguments": PLAIN, **dict.fromkeys(("id", "name", "raw", "error"), TEXT)}
_TEXTS = dict.fromkeys(("role", "content"), TEXT) | dict.fromkeys(("reasoning", "name", "tool_call_id"), MAYBE)
_MESSAGE: dict[str, Any] = {"tool_calls": [_CALL], **_TEXTS}
_TURN: dict[str, Any] = {
    "message": _MESSAGE,
    "messages": [_MESSAGE],
    "reward": (*NUMBER, type(None)),
    "tool_results": [_ANSWER],
    "finish_reason": MAYBE,
    "order": (int,),
    **dict.fromkeys(("observation", "asked", "stop"), TEXT),
}
_ORIGIN = {"label": TEXT, "client": TEXT, "num_shared": (int,), **dict.fromkeys(("row", "turn"), (int, type(None)))}
_TASK = {"env_id": TEXT, "seed": (int,), "options": PLAIN, "kwargs": PLAIN}
FIELDS: dict[str, Any] = {
    "task": _TASK,
    "metrics": PLAIN,
    "info": PLAIN,
    "error": MAYBE,
    "rows": [{"messages": [_MESSAGE], "origin": _ORIGIN}],
    "turns": [_TURN],
    **dict.fromkeys(("phase", "group"), TEXT),
    **dict.fromkeys(("step", "member"), (int,)),
}
"""The types of each field that is there. Spans are checked by `check_numbers`."""


def check_fields(line: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError, which name the field, for a line with a field of another type."""
    _check(line, FIELDS, "the line")
    for number in line["metrics"].values():
        _check(number, NUMBER, "a metric")


def check_stored_ids(values: Any) -> None:
    """Raises TypeError or ValueError for what is not a list of token ids."""
    check_numbers(values, (int,), "ids")
    if values and not 0 <= min(values) <= max(values) < 2**31:
        raise ValueError("a token id is from 0 to 2**31")


def check_numbers(values: Any, kinds: Collection[type], name: str) -> None:
    """Raises TypeError or ValueError for what is not a list of numbers of these types, each below 2**63."""
    if not isinstance(values, list) or not set(map(type, values)) <= {bool, *kinds}:
        raise TypeError(f"{name} is a list of numbers")
    if values and not (-BIGGEST < min(values) and max(values) < BIGGEST):
        raise ValueError(f"a number of {name} is too great")


def _check(value: Any, kind: Any, name: str) -> None:
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise TypeError(f"{name} is a list")
        for item in value:
            _check(item, kind[0], name)
    elif isinstance(kind, dict):
        if not isinstance(value, dict):
            raise TypeError(f"{name} is an object")
        for field, field_kind in kind.items():
            item = value.get(field)
            is_text = type(item) is str and field_kind in (TEXT, MAYBE)  # most of them, and a call takes long
            if not is_text and field in value and not (item is None and field == "messages"):
                _check(item, field_kind, field)
    elif type(value) not in kind:
        raise TypeError(f"{name} is no {type(value).__name__}")
    elif isinstance(value, int) and name != "seed" and abs(value) >= BIGGEST:
        raise ValueError(f"{name} is too great")
    elif value is not None:
        _check_finite(value, name, 0)


def _check_finite(value: Any, name: str, depth: int) -> None:
    """Raises ValueError for a number in a value that is not finite, which JSON cannot hold."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} holds a number that is not finite")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_finite(item, name, depth + 1)
