"""What the functions that a run names have in common: the inputs they must take, their settings, and whose they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from agentgym.errors import ConfigError, nearest
from agentgym.loading import blamed

__all__ = ["Contract", "calling", "is_bundled", "replaced_by", "settings_of", "with_settings"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Contract:
    """What a table's functions take. Settings are keyword-only, with defaults; the other parameters are the inputs.

    Example: `Contract("KL penalty", ("logp", "ref_logp"))` refuses `def mine(ref_logp, logp)`, whose result would be
    another one without a word.
    """

    kind: str
    inputs: tuple[str, ...]
    """The names of the inputs, in their order."""
    optional: tuple[str, ...] = ()
    """With any of these, the inputs are given by name: a function has those `inputs`, and of these what it needs."""
    keywords: tuple[str, ...] = ()
    """What is always given by name, and so must be taken."""

    def check(self, name: str, function: Callable[..., object]) -> None:
        """Raises ConfigError for what is no function, or takes something else."""
        if not callable(function):
            raise ConfigError(
                f"{self.kind} {name!r} is no function, but of the type {type(function).__name__}. {self._wanted}"
            )
        try:
            parameters = inspect.signature(function).parameters
        except ValueError as error:
            raise ConfigError(f"{self.kind} {name!r} does not say what it takes. {self._wanted}") from error
        if problem := self._problem(parameters):
            taken = str(inspect.signature(function).replace(return_annotation=inspect.Signature.empty))
            raise ConfigError(f"{self.kind} {name!r} takes {taken}, where {problem}. {self._wanted}")

    def _problem(self, parameters: Mapping[str, inspect.Parameter]) -> str:
        plain = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        named = [one for one in parameters.values() if one.kind is one.KEYWORD_ONLY]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        known = (*self.inputs, *self.optional)
        for one in plain:
            if one.name not in known:
                near = nearest(one.name, known).removeprefix(": ").removesuffix("?")
                return f"{one.name!r} is no input ({near or 'a setting stands behind a *'})"
        if lacking := [one for one in self.inputs if one not in parameters]:
            return f"it lacks {', '.join(lacking)}"
        if not self.optional and [one.name for one in plain] != list(self.inputs):
            return "the inputs stand in another order"
        if self.optional and any(one.kind is one.POSITIONAL_ONLY for one in plain):
            return "its inputs are given by name"
        for one in named:
            if one.default is one.empty and one.name not in (*known, *self.keywords):
                return f"the setting {one.name!r} has no default"
        if not takes_any and (absent := [one for one in self.keywords if one not in {n.name for n in named}]):
            return f"it lacks the keyword {', '.join(absent)}"
        return ""

    @property
    def _wanted(self) -> str:
        keywords = [f"{one}=None" for one in self.keywords]
        inputs = [*self.inputs, f"any of {', '.join(self.optional)}"] if self.optional else self.inputs
        return f"Wanted: ({', '.join([*inputs, '*', *keywords, 'settings with defaults'])})"


def is_bundled(function: Callable[..., object]) -> bool:
    """Whether the function is ours, and not a user's."""
    return str(getattr(function, "__module__", "")).startswith("agentgym.")


@contextmanager
def calling(name: str, function: Callable[..., object]) -> Iterator[None]:
    """Around a call of the function that `name` stands for: what one of the user's raises is said to be theirs."""
    if is_bundled(function):
        yield
        return
    with blamed(f"{name} failed"):
        yield


def replaced_by(kind: object, name: str) -> str:
    """The setting in the place of one that `kind` had once (its `replaced`); empty for any other name."""
    replaced: object = getattr(kind, "replaced", None)
    return str(replaced.get(name, "")) if isinstance(replaced, Mapping) else ""


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
