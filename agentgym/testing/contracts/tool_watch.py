"""Watches the tools of an environment: what they raise, also if the model would read it as its own mistake."""

from __future__ import annotations

import contextlib
import functools
import linecache
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ToolFailure
from agentgym.tools.calling.definition import Tool, ToolFunction
from agentgym.tools.calling.error_attribution import raised_at
from agentgym.types import JSON

__all__ = ["RaisedError", "watched_tools"]


@dataclass(frozen=True)
class RaisedError:
    """An exception of a tool: its call, its file and line, and whether the episode was won before."""

    error: Exception
    call: str
    location: str
    is_won: bool

    def __str__(self) -> str:
        return f"{type(self.error).__name__}{self.location}: {self.error}"

    @property
    def is_deliberate(self) -> bool:
        """True if a `raise` statement raised it."""
        frames = traceback.extract_tb(self.error.__traceback__)
        line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0) if frames else ""
        return line.strip().startswith("raise")

    def complaint(self, arguments: Mapping[str, JSON]) -> str:
        """Returns what is wrong with it; "" if it is deliberate, or if other arguments might not have raised it.

        A KeyError is over an argument if its key is one, or holds one; any other error if there are arguments.
        """
        if isinstance(self.error, ToolFailure):
            return ""
        if self.is_won:
            return f"{self.call} raised {self} after self.end(success=True): the model reads that the call failed"
        values = [str(value) for value in arguments.values()]
        if isinstance(self.error, KeyError) and self.error.args:
            values = [value for value in values if value and value in str(self.error.args[0])]
        if self.is_deliberate or values:
            return ""
        return f"{self.call} raised {self}; no argument explains that, and the model would be blamed for it"


@contextlib.contextmanager
def watched_tools(env: TextEnv) -> Iterator[list[RaisedError]]:
    """Yields a list that fills with each exception that a tool of `env`, which was reset, raises in the context."""
    inner, raised = env.unwrapped, list[RaisedError]()
    tools = inner._runner.tools if isinstance(inner, ToolEnv) else {}
    originals = dict(tools)
    for name, tool in originals.items():
        tools[name] = replace(tool, fn=_watch_tool(inner, tool, raised), pure=False)
    try:
        yield raised
    finally:
        tools.update(originals)


def _watch_tool(env: Any, tool: Tool, raised: list[RaisedError]) -> ToolFunction:
    fn = tool.fn

    def note(error: Exception, keywords: Mapping[str, Any]) -> None:
        is_won = bool(env._over and env._success)
        raised.append(RaisedError(error, f"{tool.name}({dict(keywords)})", raised_at(error, fn), is_won))

    if tool.is_async:

        @functools.wraps(fn)
        async def run_async(*args: Any, **keywords: Any) -> Any:
            try:
                return await fn(*args, **keywords)  # type: ignore[misc]
            except Exception as error:
                note(error, keywords)
                raise

        return run_async

    @functools.wraps(fn)
    def run(*args: Any, **keywords: Any) -> Any:
        try:
            return fn(*args, **keywords)
        except Exception as error:
            note(error, keywords)
            raise

    return run
