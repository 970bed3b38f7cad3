"""Plain values (numbers, texts, lists, tuples, sets, dicts) as JSON and back, each with its type.

It imports the standard library alone: the file is also copied into sandboxes, where programs' callers import it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

__all__ = ["NotPlain", "dumps", "loads"]

MAX_ALIKE = 100
"""The most values of a set, or keys of a dict, with the same hash."""
ATOMS: tuple[type, ...] = (int, float, str)
KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}
BASES: dict[str, Any] = {"list": list, "tuple": tuple, "set": (set, frozenset)}


class NotPlain(ValueError):
    """Raised for a value of another type, or a text that holds no plain value."""


def dumps(value: object) -> str:
    """The value as JSON; raises NotPlain.

    >>> dumps([1, (2.5, "x")])
    '{"list": [1, {"tuple": [2.5, "x"]}]}'
    """
    return json.dumps(_to_json(value))


def loads(text: str | bytes) -> Any:
    """The value that `dumps` wrote, made of exact builtin types; raises NotPlain for any other text."""
    try:
        return _read(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPlain(f"this is no plain value: {type(error).__name__}") from None


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in ATOMS:
        if isinstance(value, kind):
            return kind(value)
    for name, base in BASES.items():
        if isinstance(value, base):
            return {name: [_to_json(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key), _to_json(part)] for key, part in value.items()]}
    raise NotPlain(f"a {type(value).__name__} is no plain value")


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise NotPlain("a list stands under its kind")
        return value
    ((name, parts),) = value.items()
    if name == "dict":
        pairs = [(_read(key), _read(part)) for key, part in parts]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    if name not in KINDS:
        raise NotPlain("there is no such kind of value")
    values = [_read(part) for part in parts]
    if name == "set":
        _check_hashes(values)
    return KINDS[name](values)


def _check_hashes(values: list[Any]) -> None:
    """Raises NotPlain for many values with one hash, such as multiples of 2**61 - 1: a set of them takes n**2 steps."""
    if max(Counter(map(hash, values)).values(), default=0) > MAX_ALIKE:
        raise NotPlain("too many values have the same hash")
