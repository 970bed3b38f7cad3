"""The functions that a run names: the inputs they must take, their settings, and whether they are bundled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import UnionType
from typing import Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from agentgym.errors import ConfigError, nearest
from agentgym.loading import convert_user_errors

__all__ = [
    "Contract",
    "check_above_zero",
    "check_at_least",
    "check_named_numbers",
    "check_pair",
    "check_setting_names",
    "convert_function_errors",
    "is_bundled",
    "settings_of",
    "with_inputs",
    "with_settings",
]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Contract:
    """The parameters of a table's functions: settings are keyword-only, with defaults; all others are inputs.

    Example: `Contract("KL penalty", ("logp", "ref_logp"))` refuses `def mine(ref_logp, logp)`, whose result would
    silently differ.
    """

    kind: str
    inputs: tuple[str, ...]
    """The names of the inputs, in their order."""
    optional: tuple[str, ...] = ()
    """Inputs that a function may take besides `inputs`. If there are any, all inputs are given by name."""
    keywords: tuple[str, ...] = ()
    """Keywords that are always given, and that a function must therefore take."""

    def check(self, name: str, function: Callable[..., object]) -> None:
        """Raises ConfigError for an object that is not a function, or that takes other parameters."""
        if not callable(function):
            raise ConfigError(
                f"{self.kind} {name!r} is not a function, but of the type {type(function).__name__}. {self._signature}"
            )
        try:
            parameters = inspect.signature(function).parameters
        except ValueError as error:
            raise ConfigError(f"{self.kind} {name!r} does not say what it takes. {self._signature}") from error
        if problem := self._problem(parameters):
            signature = str(inspect.signature(function).replace(return_annotation=inspect.Signature.empty))
            raise ConfigError(f"{self.kind} {name!r} takes {signature}, where {problem}. {self._signature}")

    def _problem(self, parameters: Mapping[str, inspect.Parameter]) -> str:
        plain = [
            parameter
            for parameter in parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        options = [parameter for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        names = (*self.inputs, *self.optional)
        for parameter in plain:
            if parameter.name not in names:
                near = nearest(parameter.name, names).removeprefix(": ").removesuffix("?")
                return f"{parameter.name!r} is not an input ({near or 'a setting comes after a *'})"
        if lacking := [name for name in self.inputs if name not in parameters]:
            return f"it lacks {', '.join(lacking)}"
        if not self.optional and [parameter.name for parameter in plain] != list(self.inputs):
            return "the inputs are in another order"
        if self.optional and any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in plain):
            return "its inputs are given by name"
        for parameter in options:
            if parameter.default is parameter.empty and parameter.name not in (*names, *self.keywords):
                return f"the setting {parameter.name!r} has no default"
        if not takes_any and (absent := [word for word in self.keywords if word not in {n.name for n in options}]):
            return f"it lacks the keyword {', '.join(absent)}"
        return ""

    @property
    def _signature(self) -> str:
        keywords = [f"{keyword}=None" for keyword in self.keywords]
        inputs = [*self.inputs, f"any of {', '.join(self.optional)}"] if self.optional else self.inputs
        return f"Wanted: ({', '.join([*inputs, '*', *keywords, 'settings with defaults'])})"


def check_at_least(minimum: float, settings: object, *names: str, where: str = "") -> None:
    """Raises ConfigError for an attribute of `settings` below `minimum`; None passes. `where` goes before its name."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= minimum:
            raise ConfigError(f"{where}{name} must be at least {minimum:g}, got {value}")


def check_above_zero(settings: object, *names: str, where: str = "") -> None:
    """Raises ConfigError for an attribute of `settings` that is not above 0; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{where}{name} must be above 0, got {value}")


def check_pair(name: str, numbers: Sequence[object]) -> None:
    """Raises ConfigError for a setting that is not two numbers."""
    if len(numbers) != 2 or not all(isinstance(number, int | float) for number in numbers):
        raise ConfigError(f"{name} is two numbers, got {' '.join(map(str, numbers)) or 'none'}")


def check_named_numbers(name: str, numbers: Mapping[str, object], names: Collection[str]) -> None:
    """Raises ConfigError for a mapping with a name that is not `names`, or with a value that is not a number."""
    for key, value in numbers.items():
        if key not in names:
            raise ConfigError(f"{name} has no {key!r}{nearest(key, names) or '.'} Known: {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} {key} is a number, got {value!r}")


def is_bundled(function: Callable[..., object]) -> bool:
    """True if the function is ours, and not a user's."""
    return str(getattr(function, "__module__", "")).startswith("agentgym.")


@contextmanager
def convert_function_errors(name: str, function: Callable[..., object]) -> Iterator[None]:
    """Wraps a call of the function `name`: an error of a user's function becomes a UserCodeFault that names it."""
    if is_bundled(function):
        yield
        return
    with convert_user_errors(f"{name} failed"):
        yield


def settings_of(function: Callable[..., object], inputs: Collection[str] = ()) -> dict[str, object]:
    """Returns a function's settings with their defaults: its keyword-only parameters except `inputs`."""
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in inputs
    }


def with_inputs(function: Callable[..., R], gather: Callable[..., object]) -> Callable[..., R]:
    """Returns `function` as a function of the inputs of `gather` and its own settings.

    `function` takes the result of `gather`, and its settings as keywords.

    >>> squared = with_inputs(lambda total, *, power=2: total**power, lambda first, second=0: first + second)
    >>> squared(1, second=2), squared(1, 2, power=3)
    (9, 27)
    """
    inputs = inspect.signature(gather).parameters
    settings = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @wraps(function)
    def call(*args: object, **keywords: object) -> R:
        inputs_by_name = {name: keywords.pop(name) for name in inputs if name in keywords}
        return function(gather(*args, **inputs_by_name), **keywords)

    vars(call)["__signature__"] = inspect.Signature([*inputs.values(), *settings])
    return call


def check_setting_names(
    name: str, settings: Collection[str], setting_names: Collection[str], *, all_but: Collection[str] | None = None
) -> None:
    """Raises ConfigError for settings without such a name; with `all_but`, other names than those are settings too."""
    for setting in settings:
        if setting not in setting_names and (all_but is None or setting in all_but):
            choices = ", ".join(setting_names) or "none"
            raise ConfigError(
                f"{name} has no setting {setting!r}{nearest(setting, setting_names) or '.'} Its settings: {choices}"
            )


def with_settings(
    name: str, function: Callable[..., R], settings: Mapping[str, object], inputs: Collection[str] = ()
) -> Callable[..., R]:
    """Returns the function with its settings bound.

    Raises ConfigError for a setting that the function does not have, or a value of another type than the setting's.
    """
    check_setting_names(name, settings, settings_of(function, inputs))
    hints = _hints(function) if settings else {}
    for setting, value in settings.items():
        hint = hints.get(setting)
        if get_origin(hint) is Literal and value not in get_args(hint):
            choices = " or ".join(map(repr, get_args(hint)))
            raise ConfigError(f"setting {setting!r} of {name} is {choices}, got {value!r}")
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not all(isinstance(kind, type) for kind in kinds):
            continue  # without a plain type the function itself reports what is wrong
        accepted = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            choices = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"setting {setting!r} of {name} is {choices}, got {value!r}")
    return partial(function, **settings)


def _hints(function: Callable[..., object]) -> Mapping[str, object]:
    """Returns the parameters' types; empty if they are imported for the type checker alone, or for an object."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError):
        return {}
