"""Checks a call's arguments against a JSON Schema, with messages that a model can act on.

`jsonschema` takes as long to load as all tools of a program, so it is loaded for what the quick checks leave open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from agentgym.call_json import read_json
from agentgym.errors import NOT_JSON, ToolSchemaError, nearest
from agentgym.tools.calling.fast_check import fast_check, is_common_schema

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

__all__ = ["ArgumentCheck"]

MAX_MESSAGES = 3
MAX_MESSAGE_CHARS = 300
JSON_TYPES = {"integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,)}
"""The types that Python reads a JSON value as, by the name of the schema's type."""


class ArgumentCheck:
    """The compiled check of one schema: `check(arguments)` returns None, or the faults in one or more sentences.

    >>> check = ArgumentCheck({"type": "object", "properties": {"way": {"enum": ["north", "south"]}}})
    >>> check({"way": "up"})
    "argument 'way': 'up' is not one of ['north', 'south']"
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        try:
            _refuse_bad_schema(schema)
            self._surely_valid: Callable[[Any], bool] | None = fast_check(schema)
        except RecursionError:
            raise ToolSchemaError("the schema is nested too deeply") from None
        self._schema = dict(schema)

    @functools.cached_property
    def _validator(self) -> Validator:
        from agentgym.tools.calling.dialects import validator_of

        return validator_of(self._schema)

    def __call__(self, arguments: Mapping[str, Any]) -> str | None:
        try:
            if self._surely_valid is not None and self._surely_valid(arguments):
                return None
            errors = sorted(self._validator.iter_errors(arguments), key=lambda error: [str(p) for p in error.path])
            if not errors:
                return None
            return "; ".join(dict.fromkeys(self._sentence(error) for error in errors[:MAX_MESSAGES]))
        except RecursionError:
            return "the arguments are nested too deeply"
        except TimeoutError as error:
            return str(error)

    def _sentence(self, error: ValidationError) -> str:
        error = _most_telling(error)
        where = _location_of(error)
        writers: dict[str, Callable[[ValidationError], str]] = {
            "required": _missing,
            "additionalProperties": _describe_unknown,
            "type": _wrong_type,
            "anyOf": _no_option,
            "oneOf": _no_option,
        }
        text = writers.get(str(error.validator), _plain)(error)
        return _cut(f"{where}: {text}" if where else text)


def _missing(error: ValidationError) -> str:
    required: Any = error.validator_value
    arguments: Any = error.instance
    names = [repr(name) for name in required if name not in arguments]
    return f"missing {_noun(error)}{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _describe_unknown(error: ValidationError) -> str:
    if error.validator_value is not False or not isinstance(error.schema, Mapping):
        return _plain(error)
    arguments: Any = error.instance
    parameters = list(error.schema.get("properties", ()))
    names = [str(name)[:80] for name in arguments if name not in parameters]
    noun = _noun(error)
    listed = f"; known: {', '.join(parameters)}" if parameters else f"; this takes no {noun}s"
    hint = nearest(names[0], parameters) or listed if names else listed
    return f"unknown {noun} {', '.join(repr(name) for name in names[:5])}{hint}"


def _noun(error: ValidationError) -> str:
    return "field" if error.path else "argument"


def _most_telling(error: ValidationError) -> ValidationError:
    """Returns the option of a failed `anyOf` that came nearest, if it failed deeper than at the top."""
    from jsonschema.exceptions import relevance

    while error.context:
        deeper = [child for child in error.context if len(child.path) > 0]
        if not deeper:
            return error
        error = max(deeper, key=relevance)
    return error


def _location_of(error: ValidationError) -> str:
    path = list(error.absolute_path)
    if not path:
        return ""
    text = str(path[0])
    for part in path[1:]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"argument {text!r}"


def _plain(error: ValidationError) -> str:
    return _short_message(error)


def _wrong_type(error: ValidationError) -> str:
    text = _short_message(error)
    try:
        bare_type = type(read_json(error.instance)) if isinstance(error.instance, str) else None
    except NOT_JSON:
        bare_type = None
    is_quoted = bare_type in JSON_TYPES.get(str(error.validator_value), ())
    return f"{text} (write it without quotes)" if is_quoted else text


def _no_option(error: ValidationError) -> str:
    options: Any = error.validator_value
    forms = []
    for option in options:
        if isinstance(option, Mapping):
            forms.append(str(option["enum"]) if "enum" in option else str(option.get("type", "another form")))
    return f"{_short_repr(error.instance)} is not {' or '.join(forms) or 'any of the accepted forms'}"


def _short_message(error: ValidationError) -> str:
    whole = repr(error.instance)
    return str(error.message).replace(whole, _short_repr(error.instance), 1) if len(whole) > 80 else str(error.message)


def _short_repr(instance: object) -> str:
    text = repr(instance)
    return text if len(text) <= 80 else text[:77] + "..."


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


def _refuse_bad_schema(schema: Any) -> None:
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        what = f"type {schema.get('type')!r}" if isinstance(schema, Mapping) else f"{schema!r:.80}"
        raise ToolSchemaError(
            f"a tool's parameters are a JSON Schema of type 'object', got {what}; "
            'write {"type": "object", "properties": {...}}'
        )
    if is_common_schema(schema):
        return
    from agentgym.tools.calling.dialects import validator_of

    validator_of(schema)
    for reference in _references(schema):
        if not _resolves(schema, reference):
            raise ToolSchemaError(f"$ref {reference!r} does not lead anywhere inside the schema; use '#/$defs/...'")


def _references(node: object) -> Iterator[str]:
    """Yields every `$ref` anywhere in a schema."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            elif key not in ("enum", "const", "default", "examples"):
                yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _resolves(schema: Mapping[str, Any], reference: str) -> bool:
    if not reference.startswith("#"):
        return False
    if reference[1:2] not in ("", "/"):
        return True  # an $anchor; the validator finds it
    node: object = schema
    for part in unquote(reference[2:]).split("/") if len(reference) > 2 else []:
        part = part.replace("~1", "/").replace("~0", "~")
        parts = dict(enumerate(node)) if isinstance(node, list) else node
        key = int(part) if isinstance(node, list) and part.isdecimal() else part
        if not isinstance(parts, Mapping) or key not in parts:
            return False
        node = parts[key]
    return True
