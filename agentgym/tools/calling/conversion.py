"""Turns validated JSON arguments into the Python values that a typed function expects."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["argument_converter"]

Convert = Callable[[Any], Any]
ITERABLES = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


def argument_converter(hints: Mapping[str, object]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns a function from a call's validated arguments to keyword arguments.

    It converts whole floats to int where int is expected, objects to dataclasses, values to Enum members, and arrays
    to sets and tuples. Everything else is passed as it is.
    """
    converters = {name: convert for name, hint in hints.items() if (convert := _converter(hint, ())) is not None}
    if not converters:
        return dict

    def convert_all(arguments: Mapping[str, Any]) -> dict[str, Any]:
        converted = dict(arguments)
        for name, convert in converters.items():
            if name in converted:
                converted[name] = convert(converted[name])
        return converted

    return convert_all


def _converter(hint: Any, above: tuple[type, ...]) -> Convert | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return _converter(arguments[0], above)
    if isinstance(hint, typing.NewType):
        return _converter(hint.__supertype__, above)
    if hint is int:
        return _whole
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, above)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint, above)
    container = origin or hint
    if container is tuple:
        return _tuple(arguments, above)
    if container in ITERABLES:
        return _iterable(container, arguments, above)
    if origin in (dict, collections.abc.Mapping) and arguments:
        return _mapping(arguments[1], above)
    return None


def _whole(value: Any) -> Any:
    """Converts 7.0 to 7: JSON Schema counts it as an integer, and a Python function does not."""
    return int(value) if type(value) is float else value


def _union(arguments: tuple[Any, ...], above: tuple[type, ...]) -> Convert | None:
    options = [(argument, _converter(argument, above)) for argument in arguments]
    if all(convert is None for _, convert in options):
        return None

    def convert_first(value: Any) -> Any:
        for argument, convert in options:
            if _accepts(argument, value):
                return convert(value) if convert else value
        return value

    return convert_first


def _accepts(hint: Any, value: Any) -> bool:
    """Returns whether a JSON value can be meant for `hint`, judged by its outermost shape."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            return False
        fields = {field.name: field for field in dataclasses.fields(hint) if field.init}
        needed = {
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        return needed <= value.keys() <= fields.keys()
    container = typing.get_origin(hint) or hint
    if hint is bool or hint is str:
        return isinstance(value, hint)
    if hint is int or hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    if container is tuple or container in ITERABLES:
        return isinstance(value, list)
    return container not in (dict, collections.abc.Mapping) or isinstance(value, dict)


def _dataclass(cls: type, above: tuple[type, ...]) -> Convert:
    if cls in above:  # a class that contains itself: its converter is made when a value needs it
        return lambda value: _dataclass(cls, ())(value)
    hints = typing.get_type_hints(cls, include_extras=True)
    convert = argument_converter_within(hints, (*above, cls))
    return lambda value: cls(**convert(value))


def argument_converter_within(hints: Mapping[str, object], above: tuple[type, ...]) -> Callable[[Any], dict[str, Any]]:
    """`argument_converter` for the fields of a class nested in the classes `above`."""
    converters = {name: convert for name, hint in hints.items() if (convert := _converter(hint, above)) is not None}
    return lambda value: {key: converters[key](item) if key in converters else item for key, item in value.items()}


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
