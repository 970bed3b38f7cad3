"""Refuses keywords that an environment's class does not take, with the nearest one that it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from agentgym.errors import ConfigError, nearest

__all__ = ["checks_keywords"]


def checks_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor `init`, which raises ConfigError for a keyword that it does not take."""
    _, *parameters = inspect.signature(init).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return init
    own_keywords = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]

    @functools.wraps(init)
    def check_and_init(self: object, /, *args: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in own_keywords:
                listing = ", ".join(keyword for keyword in own_keywords if keyword != "render_mode") or "no keywords"
                hint = nearest(name, own_keywords) or "."
                raise ConfigError(f"{type(self).__name__} does not take the keyword {name!r}{hint} It takes: {listing}")
        init(self, *args, **keywords)

    return check_and_init
