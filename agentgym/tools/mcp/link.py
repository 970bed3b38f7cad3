"""What the tools of an episode need of a server, whether it is theirs alone or shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentgym.errors import EnvironmentFault
from agentgym.types import JSON, ToolSpec

__all__ = ["Link", "ServerLost"]


class ServerLost(EnvironmentFault):
    """A server that ended, hangs, or cannot be reached: the episode has an infrastructure failure, and no reward."""


class Link(Protocol):
    """A way to a server. Its methods run on the event loop that it was made for."""

    async def open(self) -> Sequence[ToolSpec]:
        """Starts or reaches the server; gives its tools. Raises ServerLost."""

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> Mapping[str, object]:
        """A tool's result as MCP has it. Raises ToolFailure for what the model is to read, ServerLost otherwise."""

    async def close(self) -> None:
        """Ends what was opened; a second call does nothing."""
