"""Turns validated JSON arguments into the Python values that a typed function expects."""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from agentgym.tools.calling.field_metadata import Fields
from agentgym.tools.calling.schema import ARRAYS, OBJECTS, class_fields, is_class_with_fields, type_schema
from agentgym.tools.calling.validation import ArgumentCheck

__all__ = ["argument_converter"]

Convert = Callable[[Any], Any]
NOTES = {"title", "description", "examples"}
"""Keywords that take every value."""


def argument_converter(fields: Fields, above: tuple[type, ...] = ()) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns a function from a call's validated arguments to keyword arguments.

    It converts whole floats to int where int is expected, objects to dataclasses, values to Enum members, and arrays
    to sets and tuples, and adds the defaults of pydantic's Fields. Everything else is passed as it is. `above` are the
    classes that `fields` is nested in.
    """
    items = fields.hints.items()
    converters = {name: convert for name, hint in items if (convert := _converter(hint, above)) is not None}
    if not converters and not fields.given:
        return dict

    def convert_all(arguments: Mapping[str, Any]) -> dict[str, Any]:
        converted = dict(arguments)
        for name, convert in converters.items():
            if name in converted:
                converted[name] = convert(converted[name])
        return fields.add_defaults(converted)

    return convert_all


def _converter(hint: Any, above: tuple[type, ...]) -> Convert | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return _converter(arguments[0], above)
    if isinstance(hint, typing.NewType):
        return _converter(hint.__supertype__, above)
    if isinstance(hint, typing.TypeVar):
        return _converter(hint.__bound__, above)
    if hint is int:
        return _whole
    if origin is typing.Literal:
        return _member(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, above)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if is_class_with_fields(hint):
        return _class_object(hint, above)
    container = origin or hint
    if container is tuple:
        return _tuple(arguments, above)
    if container in ARRAYS:
        return _iterable(container, arguments, above)
    if origin in OBJECTS and arguments:
        return _mapping(arguments[1], above)
    return None


def _whole(value: Any) -> Any:
    """Converts 7.0 to 7: JSON Schema counts it as an integer, and a Python function does not."""
    return int(value) if type(value) is float else value


def _member(choices: tuple[Any, ...]) -> Convert | None:
    """Converts the value of an Enum member in a Literal to the member."""
    members = {choice.value: choice for choice in choices if isinstance(choice, enum.Enum)}
    return (lambda value: members.get(value, value)) if members else None


def _union(arguments: tuple[Any, ...], above: tuple[type, ...]) -> Convert | None:
    """Converts to the first type whose schema the value fits; one that takes everything comes last."""
    converters = [(argument, _converter(argument, above)) for argument in arguments]
    if all(convert is None for _, convert in converters):
        return None

    @functools.cache  # made when a value needs them: a class that contains itself is not complete before
    def options() -> list[tuple[Callable[[Any], bool], Convert | None]]:
        schemas = [(type_schema(argument), convert) for argument, convert in converters]
        schemas.sort(key=lambda option: option[0].keys() <= NOTES)
        return [(_fits(schema), convert) for schema, convert in schemas]

    def convert_first(value: Any) -> Any:
        if value is None and type(None) in arguments:
            return None
        convert = next((convert for fits, convert in options() if fits(value)), None)
        return convert(value) if convert else value

    return convert_first


def _fits(schema: dict[str, Any]) -> Callable[[Any], bool]:
    definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
    check = ArgumentCheck({"type": "object", "properties": {"value": schema}, **definitions})
    return lambda value: check({"value": value}) is None


def _class_object(cls: Any, above: tuple[type, ...]) -> Convert:
    if cls in above:  # a class that contains itself: its converter is made when a value needs it
        return lambda value: _class_object(cls, ())(value)
    convert = argument_converter(class_fields(cls), (*above, cls))
    return lambda value: cls(**convert(value))


def _tuple(arguments: tuple[Any, ...], above: tuple[type, ...]) -> Convert:
    if not arguments or arguments[-1] is Ellipsis:
        convert = _converter(arguments[0], above) if arguments else None
        return (lambda value: tuple(convert(item) for item in value)) if convert else tuple
    converters = [_converter(argument, above) for argument in arguments]
    return lambda value: tuple(
        convert(item) if convert else item for convert, item in zip(converters, value, strict=True)
    )


def _iterable(container: Any, arguments: tuple[Any, ...], above: tuple[type, ...]) -> Convert | None:
    convert = _converter(arguments[0], above) if arguments else None
    kind = container if container in (set, frozenset) else list
    if convert is None:
        return kind if kind is not list else None
    return lambda value: kind(convert(item) for item in value)


def _mapping(hint: Any, above: tuple[type, ...]) -> Convert | None:
    convert = _converter(hint, above)
    return (lambda value: {key: convert(item) for key, item in value.items()}) if convert else None
