"""Reads a tool call that is a JSON object, by one rule for replies of models, endpoints, clients and files of data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from agentgym.types import JSON

__all__ = [
    "ARGUMENT_KEYS",
    "LABELS",
    "MAX_JSON_DEPTH",
    "add_unique",
    "as_call",
    "check_outside",
    "is_too_deep",
    "json_kind",
    "keys_outside",
    "read_arguments",
    "read_json",
]

ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "inputs", "params", "kwargs")
"""The keys under which a call's arguments are written somewhere."""
LABELS = frozenset(
    "id type index call_id tool_call_id caller provider_specific_fields extra_content thought_signature".split()
)
"""The keys by which models and servers label a call: they hold no arguments."""
MAX_JSON_DEPTH = 100
"""The deepest arguments of a call: templates that write deeper ones would run out of stack."""


def as_call(
    value: JSON, name_keys: Sequence[str] = ("name",), argument_keys: Sequence[str] = ("arguments",)
) -> tuple[str, Mapping[str, JSON]]:
    """Returns the name and arguments of a call that is a JSON object; raises ValueError that names what is wrong.

    A key whose value is null is missing, and the first key that is present counts. Any other key but `LABELS` is an
    error, because the arguments may be under it. For arguments see `read_arguments`.

    >>> as_call({"name": "look", "arguments": ""})
    ('look', {})
    >>> as_call({"name": "go", "parameters": {"direction": "north"}})
    Traceback (most recent call last):
    ValueError: a call has the keys "name" and "arguments", and no "parameters"
    """
    if not isinstance(value, dict | Mapping):  # a dict is recognized at once
        raise ValueError(f"a call is a JSON object, got {json_kind(value)}")
    name_key, key = _first_key(value, name_keys), _first_key(value, argument_keys)
    unknown = [f'"{k:.40}"' for k in value if k not in (name_key, key) and k not in LABELS and value[k] is not None]
    if unknown:
        keys = f'"{name_key or name_keys[0]}" and "{key or argument_keys[0]}"'
        raise ValueError(f"a call has the keys {keys}, and no {', '.join(unknown)}")
    name = None if name_key is None else value[name_key]
    if not isinstance(name, str) or not name:
        raise ValueError(f'a call needs a "{name_keys[0]}" that is a non-empty string')
    return name, read_arguments(None if key is None else value[key])


def read_arguments(value: JSON) -> Mapping[str, JSON]:
    """Returns the arguments of a call: an object, or the JSON text of one; null and an empty text are no arguments.

    Raises ValueError for anything else.
    """
    if isinstance(value, str) and value:
        try:
            value = read_json(value)
        except ValueError as error:
            is_clause = str(error).startswith("invalid JSON")
            raise ValueError(f"the arguments are {error}" if is_clause else f"of the arguments, {error}") from None
    if value is None or value == "":
        return {}
    if not isinstance(value, dict | Mapping):
        raise ValueError(f"the arguments are a JSON object, got {json_kind(value)}")
    return value


def check_outside(call: Mapping[str, object]) -> None:
    """Raises ValueError if a call with a `function`, as OpenAI's API writes it, has arguments outside of it."""
    for key in keys_outside(call):
        raise ValueError(f'a call has its arguments within "function", and no "{key}" outside of it')


def keys_outside(call: Mapping[str, object]) -> list[str]:
    """Returns the keys beside a call's `function` whose values may be arguments."""
    keys = [key for key in call if key != "function" and key not in LABELS and call[key] not in (None, "", {})]
    return [key for key in keys if key in ARGUMENT_KEYS or isinstance(call[key], Mapping)]


def add_unique(values: dict[str, JSON], key: str, value: JSON) -> None:
    """Adds a value to an object; raises ValueError for a key that it has, because one of the values would vanish."""
    if key in values:
        raise ValueError(f"{key:.40} is given twice")
    values[key] = value


def _first_key(value: Mapping[str, JSON], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if value.get(key) is not None), None)


def json_kind(value: JSON) -> str:
    """Returns the kind of a value, for a message: `a list`."""
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "null" if value is None else "a list" if isinstance(value, Sequence) else f"the value {value!r}"[:40]


def read_json(text: str) -> JSON:
    """Returns the value that `text` spells; raises ValueError with the reason.

    Values that JSON does not have (NaN, infinities, lone surrogates) are refused, and so are keys that occur twice and
    values that are nested more than `MAX_JSON_DEPTH` levels deep: templates that write them would run out of stack.
    """
    try:
        value: JSON = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error.msg} at character {error.pos})") from None
    except UnicodeEncodeError:
        raise ValueError("invalid JSON (a lone surrogate)") from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise ValueError("invalid JSON (an integer of too many digits)") from None
    except RecursionError:
        raise ValueError("invalid JSON (nested too deeply)") from None
    if is_too_deep(value, text.count("[") + text.count("{")):
        raise ValueError("invalid JSON (nested too deeply)")
    return value


def is_too_deep(value: object, num_openings: int) -> bool:
    """Returns True if containers are nested deeper than `MAX_JSON_DEPTH`; their text has `num_openings` brackets."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH if num_openings > MAX_JSON_DEPTH else 0):
        children = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]  # type: ignore[attr-defined]
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return num_openings > MAX_JSON_DEPTH


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"invalid JSON ({name} is not JSON)")


def read_finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"invalid JSON (the number {text[:20]} is too large)")
    return value


def _unique_keys(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    values: dict[str, JSON] = {}
    for key, value in pairs:
        add_unique(values, key, value)
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=no_constant, parse_float=read_finite)
