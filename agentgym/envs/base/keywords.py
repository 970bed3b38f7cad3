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
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return init
    taken = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]

    @functools.wraps(init)
    def checked(self: object, /, *args: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in taken:
                shown = ", ".join(one for one in taken if one != "render_mode") or "no keywords"
                hint = nearest(name, taken) or "."
                raise ConfigError(f"{type(self).__name__} does not take the keyword {name!r}{hint} It takes: {shown}")
        init(self, *args, **keywords)

    return checked
