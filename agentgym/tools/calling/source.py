"""Tools that come with their own state, made for one episode: a server, a sandbox, a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from agentgym.tools.calling.definition import Tool

__all__ = ["ToolSource"]


@runtime_checkable
class ToolSource(Protocol):
    """A source of tools, opened when an episode begins and closed when it ends, whatever happened in between."""

    def open(self) -> Sequence[Tool]:
        """Creates the state and returns the tools that work on it."""

    def close(self) -> None:
        """Releases the state; called once for each `open`, also after a failed one."""
