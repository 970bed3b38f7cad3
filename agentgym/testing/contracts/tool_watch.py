"""Watches the tools of an environment: what they raise, also if the model would read it as its own mistake."""

from __future__ import annotations

import functools
import linecache
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.tools.calling.definition import Tool, ToolFunction
from agentgym.tools.calling.error_attribution import raised_at
from agentgym.types import JSON

__all__ = ["is_deliberate", "is_over_an_argument", "watch_tools"]

Raised = list[tuple[Exception, str]]


def watch_tools(env: TextEnv) -> Raised:
    """Returns a list that fills with each exception that a tool of `env` raises from now on, and its file and line."""
    raised: Raised = []
    inner = env.unwrapped
    if isinstance(inner, ToolEnv):
        tools = inner._runner.tools
        for name, tool in tools.items():
            tools[name] = replace(tool, fn=_watch_tool(tool, raised), pure=False)
    return raised


def is_deliberate(error: Exception) -> bool:
    """Returns True if `error` was raised by a `raise` statement."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip().startswith("raise")


def is_over_an_argument(error: Exception, arguments: Mapping[str, JSON]) -> bool:
    """Returns True if other arguments might not have raised `error`.

    A KeyError is over an argument if its key is one, or holds one; any other error if there are arguments.
    """
    if isinstance(error, KeyError) and error.args:
        return any(str(value) and str(value) in str(error.args[0]) for value in arguments.values())
    return bool(arguments)


def _watch_tool(tool: Tool, raised: Raised) -> ToolFunction:
    fn = tool.fn

    def note(error: Exception) -> None:
        raised.append((error, raised_at(error, fn)))

    if tool.is_async:

        @functools.wraps(fn)
        async def run_async(*args: Any, **keywords: Any) -> Any:
            try:
                return await fn(*args, **keywords)  # type: ignore[misc]
            except Exception as error:
                note(error)
                raise

        return run_async

    @functools.wraps(fn)
    def run(*args: Any, **keywords: Any) -> Any:
        try:
            return fn(*args, **keywords)
        except Exception as error:
            note(error)
            raise

    return run
