"""Checks how environments are made: keywords that a class does not take, and bases that were not called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.envs.base.author_checks import check_attributes
from agentgym.errors import ConfigError, nearest

__all__ = ["checks_keywords"]


def checks_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor `init`, which raises ConfigError for a keyword that it does not take.

    It also raises ConfigError for a class that does not call the constructors of its bases, and for an attribute that
    hides a method.
    """
    _, *parameters = inspect.signature(init).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    own_keywords = _keyword_names(parameters)

    @functools.wraps(init)
    def check_and_init(self: Any, /, *args: Any, **keywords: Any) -> None:
        for name in keywords:
            if not takes_any and name not in own_keywords:
                all_keywords = _keywords_of(type(self))
                listing = ", ".join(keyword for keyword in all_keywords if keyword != "render_mode") or "no keywords"
                hint = nearest(name, all_keywords) or "."
                raise ConfigError(f"{type(self).__name__} does not take the keyword {name!r}{hint} It takes: {listing}")
        init(self, *args, **keywords)
        if type(self).__init__ is check_and_init:  # the outermost: all bases had their turn
            self._check_made()
            check_attributes(self)

    return check_and_init


def _keywords_of(cls: type) -> list[str]:
    """Returns the keywords of a class: its own, and those of the constructors that it passes others on to."""
    keywords: list[str] = []
    for init in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        _, *parameters = inspect.signature(init).parameters.values()
        keywords += _keyword_names(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(dict.fromkeys(keywords))


def _keyword_names(parameters: Sequence[inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]
