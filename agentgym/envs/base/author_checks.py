"""Finds slips in an author's environment where they are made: in its class, its constructor and its attributes."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agentgym.errors import ConfigError
from agentgym.tools.calling.definition import Tool

__all__ = ["called_at", "check_attributes", "check_parameters", "check_tool_names", "running_call"]

BASE = Path(__file__).parent


def check_tool_names(cls: type, base: type, tools: Iterable[tuple[str, Tool]]) -> None:
    """Raises ConfigError for a tool whose method has the name of one of `base`."""
    for name, tool in tools:
        if hasattr(base, name):
            raise ConfigError(
                f"{cls.__name__}: {name!r} is a method of {base.__name__}, so no method with @tool can bear its name; "
                f"write another, and @tool(name={tool.name!r}) if the model is to call it so"
            )


def check_parameters(cls: type, hooks: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError for a method of a class that cannot be called with the parameters in `hooks`."""
    for name in hooks.keys() & vars(cls).keys():
        try:
            inspect.signature(vars(cls)[name].__get__(cls, cls)).bind(*hooks[name])
        except TypeError as error:
            form = f"def {name}({', '.join(['self', *hooks[name]])})"
            raise ConfigError(f"{cls.__name__}.{name} cannot be called: {error}; write it as {form}") from None


def check_attributes(env: object) -> None:
    """Raises ConfigError for an attribute that hides a method of its class: `self.step = 0`; None takes one away."""
    for name, value in vars(env).items():
        if value is not None and not callable(value) and inspect.isfunction(getattr(type(env), name, None)):
            problem = f"self.{name} = {value!r:.40} hides the method of this name"
            raise ConfigError(f"{type(env).__name__}: {problem}; name the attribute otherwise")


def running_call() -> tuple[int, str]:
    """Returns what tells calls of tools apart that run at once: the thread, and the name of an async one's task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task.get_name() if task is not None else ""


def called_at() -> str:
    """Returns " (FILE, line N)" of the author's line that leads to this call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == BASE:
        frame = frame.f_back
    return f" ({frame.f_code.co_filename}, line {frame.f_lineno})"
