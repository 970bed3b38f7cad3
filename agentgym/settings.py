"""Settings of the functions that a run names: estimators, losses, corrections, rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import UnionType
from typing import Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from agentgym.errors import ConfigError, nearest

__all__ = ["settings_of", "with_settings"]

P = ParamSpec("P")
R = TypeVar("R")


def settings_of(function: Callable[..., object], inputs: Collection[str] = ()) -> dict[str, object]:
    """A function's settings with their defaults: its keyword-only parameters but for `inputs`."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in inputs}


def with_settings(
    name: str, function: Callable[..., R], settings: Mapping[str, object], inputs: Collection[str] = ()
) -> Callable[..., R]:
    """The function with its settings.

    Raises ConfigError for a setting that it does not have, or of another type than the setting's.
    """
    known, hints = settings_of(function, inputs), _hints(function) if settings else {}
    for setting, value in settings.items():
        if setting not in known:
            told = ", ".join(known) or "none"
            raise ConfigError(f"{name} has no setting {setting!r}{nearest(setting, known) or '.'} Its settings: {told}")
        hint = hints.get(setting)
        if get_origin(hint) is Literal and value not in get_args(hint):
            told = " or ".join(map(repr, get_args(hint)))
            raise ConfigError(f"setting {setting!r} of {name} is {told}, got {value!r}")
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not all(isinstance(kind, type) for kind in kinds):
            continue  # without a plain type the function itself says what is wrong
        accepted = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            told = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"setting {setting!r} of {name} is {told}, got {value!r}")
    return partial(function, **settings)


def _hints(function: Callable[..., object]) -> Mapping[str, object]:
    """The parameters' types; none where they are imported for the type checker alone, or it is an object."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError):
        return {}
