"""Dataclasses of settings: names and types are checked when one is made, and a notebook shows what was set."""

from __future__ import annotations

import inspect
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin, get_type_hints

from agentgym.errors import ConfigError, MissingSetting, nearest
from agentgym.loading import code_path_of
from agentgym.notebook.html_view import html_table, short_text
from agentgym.settings.other_names import OTHER_NAMES

__all__ = ["config_class", "config_from_mapping", "flatten_settings"]

C = TypeVar("C")
T = TypeVar("T")
TYPE_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None (null)"}

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 6, 200, 900
_short.maxdict = _short.maxlist = _short.maxtuple = 12


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def config_class(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass of settings, which are given by name.

    A block of settings may be given as a mapping, a tuple as a list, a path as a text, and, where a name is taken, a
    class or function that can be imported. Raises ConfigError for an unknown name, with the nearest known one, and for
    a value of another type. A method `check_names` is called last, but not for a recorded configuration, whose process
    may have had names of its own.
    """
    kind: Any = dataclass(frozen=True, kw_only=True, repr=False)(cls)
    init = kind._init = kind.__init__

    @wraps(init)
    def checked_init(self: object, *args: object, **values: object) -> None:
        if args:
            first = next(iter(_settings(kind)), "name")
            raise ConfigError(
                f"{kind.__name__} takes settings by name, such as {first}=..., got {_short.repr(args[0])}"
            )
        values = _read_values(kind, values, "", in_python=True)
        _check_all_given(kind, values, "")
        init(self, **values)
        getattr(kind, "check_names", bool)(self)

    own = {"__init__": checked_init, "_repr_html_": _repr_html, "__repr__": vars(cls).get("__repr__", _repr)}
    for name, function in own.items():
        setattr(kind, name, function)
    return cast("type[T]", kind)


def config_from_mapping(kind: type[C], mapping: Mapping[str, object], where: str = "", default: C | None = None) -> C:
    """Builds a configuration from nested mappings, such as those of a YAML file; others are those of `default`.

    Raises ConfigError for an unknown key, naming the nearest known one, for a missing one, and for a value of another
    type than the setting's. A number in quotes is a number: YAML reads `1e-4`, without a point, as text.
    """
    if not is_dataclass(kind):
        raise ConfigError(f"{where or 'the configuration'} holds no settings of its own")
    values = _read_values(kind, mapping, where, in_python=False)
    if default is not None:
        values = {name: getattr(default, name) for name in _settings(kind)} | values
    _check_all_given(kind, values, where)
    config = object.__new__(kind)
    vars(kind).get("_init", kind.__init__)(config, **values)
    return config


def flatten_settings(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Flattens `{"optimizer": {"name": "adamw"}}` to `{"optimizer.name": "adamw"}`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten_settings(value, f"{where}{name}.") if isinstance(value, Mapping) else {where + name: value}
    return flat


def _check_all_given(kind: Any, values: Mapping[str, object], where: str) -> None:
    settings = _settings(kind).items()
    if absent := [name for name, setting in settings if _default(setting) is MISSING and name not in values]:
        raise MissingSetting(f"missing {where}{absent[0]}")


_fields: Callable[[Any], tuple[Field[object], ...]] = cache(fields)
_hints: Callable[[Any], Mapping[str, Any]] = cache(get_type_hints)


def _settings(kind: Any) -> Mapping[str, Field[object]]:
    return {setting.name: setting for setting in _fields(kind) if setting.init}


def _default(setting: Field[object]) -> object:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def _read_values(kind: Any, values: Mapping[str, object], where: str, *, in_python: bool) -> dict[str, Any]:
    """Returns the values of settings by name, each in the type of its setting."""
    settings = _settings(kind)
    for name in values:
        if name not in settings:
            raise ConfigError(f"unknown setting {where + name!r}{_hint(kind, name, where, in_python=in_python)}")
    return {
        name: _read_value(_hints(kind)[name], value, where + name, _default(settings[name]))
        for name, value in values.items()
    }


def _hint(kind: Any, name: str, where: str, *, in_python: bool) -> str:
    """Suggests the setting for an unknown name: of another system, of a block, a typo, or a short form (`lr`, `n`)."""
    paths = sorted(_walk(kind), key=len)
    other = [path for path in paths if ".".join(path) == OTHER_NAMES.get(name)]
    own = [path[0] for path in paths if len(path) == 1]
    exact = [path for path in paths if path[-1] == name]
    typo = [path for path in paths if path == (_nearest(name, own),)]
    short = [path for path in paths if path[-1].startswith(name) or _initials(path[-1]) == name]
    inner = [path for path in paths if path[-1] == _nearest(name, [path[-1] for path in paths])]
    if not (near := [*other, *exact, *typo, *short, *inner][:1]):
        return f". Known: {', '.join(sorted(own))}"
    *blocks, last = near[0]
    if in_python and blocks:
        inside = f"{{{last!r}: ...}}"
        for block in reversed(blocks[1:]):
            inside = f"{{{block!r}: {inside}}}"
        return f": did you mean {blocks[0]}={inside}?"
    return f": did you mean {'.'.join([*blocks, last])!r}?"


def _walk(kind: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of every setting of a class and of its blocks."""
    for name in _settings(kind):
        yield (*before, name)
        if is_dataclass(hint := _hints(kind)[name]):
            yield from _walk(hint, (*before, name))


def _nearest(name: str, names: Iterable[str]) -> str:
    return nearest(name, names).partition("'")[2].partition("'")[0]


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_") if word)


def _read_value(hint: Any, value: object, name: str, default: object = MISSING) -> object:
    """Returns the value of the setting `name` as the type `hint`; raises ConfigError for a value of another type."""
    kinds = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    for kind in kinds:
        if (result := _as_kind(kind, value, name, default)) is not MISSING:
            return result
    if block := next((kind for kind in kinds if is_dataclass(kind)), None):
        shape = f"{name.rpartition('.')[2]}={{'{next(iter(_settings(block)))}': ...}}"
        raise ConfigError(
            f"setting {name!r} holds settings of its own: {', '.join(_settings(block))}. Write them as {shape};"
            f" got {_short.repr(value)}"
        )
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    near = nearest(value, choices) if isinstance(value, str) else ""
    if str in kinds and hasattr(value, "reset") and hasattr(value, "step"):  # an environment
        near = f": give the class {type(value).__name__} itself, not an object of it"
    wanted_type = " or ".join(map(_format_type, kinds))
    raise ConfigError(f"setting {name!r} is {wanted_type}, got {_short.repr(value)}{near}")


def _as_kind(kind: Any, value: object, name: str, default: object) -> object:
    """Returns the value as the type `kind`, or MISSING if it is of another one."""
    origin = get_origin(kind) or kind
    if is_dataclass(origin) and isinstance(value, Mapping):
        start = default if isinstance(default, cast(type, origin)) else None
        return config_from_mapping(cast("type[object]", origin), value, f"{name}.", start)
    if origin is tuple and isinstance(value, list | tuple):
        args = get_args(kind)
        return tuple(_read_value(args[0], item, name) for item in value) if args[-1:] == (...,) else tuple(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if origin is float and (is_number or isinstance(value, str)):
        try:
            return float(cast("str", value))
        except ValueError:
            return MISSING
    if origin is int:
        return int(value) if is_number and isinstance(value, Integral) else MISSING
    if origin is str and (inspect.isclass(value) or inspect.isfunction(value)):
        return _import_path(value, name)
    if origin in (str, Path) and isinstance(value, str | os.PathLike):
        return os.fspath(value) if origin is str else Path(value)
    if origin is Literal:
        return value if value in get_args(kind) else MISSING
    is_any = origin is Any or not isinstance(origin, type)
    return value if is_any or isinstance(value, origin) else MISSING


def _import_path(value: object, name: str) -> str:
    path = code_path_of(value)
    module, _, attribute = path.partition(":")
    if getattr(sys.modules.get(module), attribute, None) is not value:
        raise ConfigError(
            f"setting {name!r}: {attribute} cannot be found by its name; define it at the top of a module"
        )
    return path


def _format_type(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list"
    return next((word for key, word in TYPE_WORDS.items() if key is kind), "a mapping of names to values")


def _changes(config: Any) -> dict[str, object]:
    """Returns the settings that are not those of the class."""
    visible = {name: setting for name, setting in _settings(type(config)).items() if setting.repr}
    return {name: value for name, setting in visible.items() if (value := getattr(config, name)) != _default(setting)}


def _repr(config: Any) -> str:
    values = ", ".join(f"{name}={_short.repr(value)}" for name, value in _changes(config).items())
    return short_text(f"{type(config).__name__}({values})")


def _repr_html(config: Any) -> str:
    rows = [(name, _short.repr(value)) for name, value in flatten_settings(_as_mapping(config)).items()]
    return html_table(f"{type(config).__name__}: settings that are not the defaults", rows)


def _as_mapping(config: Any) -> dict[str, object]:
    values = _changes(config).items()
    return {name: _as_mapping(value) if is_dataclass(value) else value for name, value in values}
