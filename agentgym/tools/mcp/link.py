"""The interface of a server that an episode's tools use, whether it is theirs alone or shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentgym.errors import EnvironmentFault
from agentgym.types import JSON, ToolSpec

__all__ = ["McpLink", "ServerLost"]


class ServerLost(EnvironmentFault):
    """The server ended, hangs, or cannot be reached: the episode has an infrastructure failure, and no reward."""


class McpLink(Protocol):
    """A connection to a server. Its methods run on the event loop that it was made for."""

    async def open(self) -> Sequence[ToolSpec]:
        """Starts or connects to the server; returns its tools. Raises ServerLost."""

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> Mapping[str, object]:
        """Returns a tool's result in MCP's form. Raises ToolFailure for an error of the model's, else ServerLost."""

    async def close(self) -> None:
        """Closes the connection; a second call does nothing."""
