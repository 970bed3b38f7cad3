"""Yes-checks of the common JSON Schema keywords, for values and for schemas: False means ask the full validator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["fast_check", "is_common_schema"]

Check = Callable[[Any], bool]
IGNORED = {"title", "description", "default", "examples", "$defs", "$schema", "$id", "$comment", "deprecated"}
NUMERIC = {"minimum", "maximum"}
KEYWORDS = {
    "string": {"type", "enum", "minLength", "maxLength"},
    "integer": {"type", "enum"} | NUMERIC,
    "number": {"type", "enum"} | NUMERIC,
    "boolean": {"type"},
    "null": {"type"},
    "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required", "additionalProperties"},
}


def fast_check(schema: object) -> Check | None:
    """Returns a check that is True only for values the schema accepts, or None if the schema is not supported."""
    if schema is True or schema == {}:
        return _anything
    if not isinstance(schema, Mapping):
        return None
    keywords = set(schema) - IGNORED
    if keywords == {"anyOf"}:
        return _any_of(schema["anyOf"])
    kind = schema.get("type")
    if kind is None and keywords == {"enum"}:
        return _choice(schema["enum"])
    if not isinstance(kind, str) or kind not in KEYWORDS or not keywords <= KEYWORDS[kind]:
        return None
    return _BUILDERS[kind](schema)


def is_common_schema(schema: object) -> bool:
    """Returns True only for a well-formed schema whose keywords are all common ones."""
    if not isinstance(schema, Mapping):
        return isinstance(schema, bool)
    return all(name in _IS_FORMED and _IS_FORMED[name](value) for name, value in schema.items())


def _anything(value: Any) -> bool:
    return True


def _any_of(options: list[object]) -> Check | None:
    checks = [check for option in options if (check := fast_check(option)) is not None]
    return (lambda value: any(check(value) for check in checks)) if checks else None


def _choice(values: list[object]) -> Check | None:
    """Checks only lists of strings, or of whole numbers: elsewhere 1, 1.0 and true need JSON's notion of equality."""
    for kind in (str, int):
        if all(type(value) is kind for value in values):
            choices = frozenset(values)
            return lambda value: type(value) is kind and value in choices
    return None


def _string(schema: Mapping[str, Any]) -> Check | None:
    if "enum" in schema:
        return _choice(schema["enum"]) if not {"minLength", "maxLength"} & set(schema) else None
    low, high = schema.get("minLength", 0), schema.get("maxLength", float("inf"))
    if low == 0 and high == float("inf"):
        return lambda value: type(value) is str
    return lambda value: type(value) is str and low <= len(value) <= high


def _number(schema: Mapping[str, Any]) -> Check | None:
    kinds = {int} if schema["type"] == "integer" else {int, float}
    if "enum" in schema:
        return _choice(schema["enum"]) if not NUMERIC & set(schema) and schema["type"] == "integer" else None
    low, high = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
    return lambda value: type(value) in kinds and low <= value <= high


def _boolean(schema: Mapping[str, Any]) -> Check:
    return lambda value: value is True or value is False


def _null(schema: Mapping[str, Any]) -> Check:
    return lambda value: value is None


def _array(schema: Mapping[str, Any]) -> Check | None:
    item = fast_check(schema.get("items", True))
    if item is None:
        return None
    low, high = schema.get("minItems", 0), schema.get("maxItems", float("inf"))
    return lambda value: type(value) is list and low <= len(value) <= high and all(map(item, value))


def _object(schema: Mapping[str, Any]) -> Check | None:
    checks = {name: fast_check(part) for name, part in schema.get("properties", {}).items()}
    own_checks = {name: check for name, check in checks.items() if check is not None}
    required = tuple(schema.get("required", ()))
    extra = schema.get("additionalProperties", True)
    if len(own_checks) != len(checks) or extra not in (True, False):
        return None

    def check_object(value: Any) -> bool:
        if type(value) is not dict:
            return False
        for name in required:
            if name not in value:
                return False
        for name, item in value.items():
            check = own_checks.get(name)
            if check is None:
                if not extra:
                    return False
            elif not check(item):
                return False
        return True

    return check_object


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Check | None]] = {
    "string": _string,
    "integer": _number,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "array": _array,
    "object": _object,
}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_common_schema, value))


_IS_FORMED: dict[str, Check] = {
    "type": lambda value: isinstance(value, str) and value in KEYWORDS,
    "title": _is_text,
    "description": _is_text,
    "default": _anything,
    "enum": lambda value: isinstance(value, list),
    "minimum": _is_number,
    "maximum": _is_number,
    "minLength": _is_count,
    "maxLength": _is_count,
    "minItems": _is_count,
    "maxItems": _is_count,
    "items": is_common_schema,
    "anyOf": _are_schemas,
    "required": _are_names,
    "properties": lambda value: isinstance(value, Mapping) and all(map(is_common_schema, value.values())),
    "additionalProperties": is_common_schema,
}
"""The values that each common keyword may have."""
