"""The messages between the run and a process of environments: pickled, over a pair of sockets."""

from __future__ import annotations

import asyncio
import pickle
import socket
from dataclasses import dataclass
from typing import Any, Literal

from agentgym.errors import ConfigError, EnvironmentFault, UnknownName
from agentgym.rollout.hosting.env_code import EnvCallTimeout
from agentgym.rollout.hosting.hosted_env import DistantTraceback

__all__ = ["EnvLink", "Failure"]

HEAD = 8
"""The number of bytes that hold a message's length."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a call, without its object, whose class may exist in only one of the processes."""

    kind: Literal["fault", "timeout", "config", "name"]
    message: str
    tool: str = ""
    traceback: str | None = None

    def error(self) -> Exception:
        """Returns the error to be raised where the call was made."""
        if self.kind == "config":
            return ConfigError(self.message)
        if self.kind == "name":
            return UnknownName(f"{self.message} (in a process of environments: env_processes)")
        is_fault = self.kind == "fault"
        error = EnvironmentFault(self.message, tool=self.tool) if is_fault else EnvCallTimeout(self.message)
        error.__cause__ = None if self.traceback is None else DistantTraceback(self.traceback)
        return error


class EnvLink:
    """One end of the connection; `EnvLink.open` makes one in the running event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> EnvLink:
        """Opens the end as a link, which closes it."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, *message: object) -> None:
        """Sends a message without waiting; a message to an end that is gone is lost."""
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(HEAD) + data)

    async def receive(self) -> tuple[Any, ...] | None:
        """Returns the next message; None if there will be none."""
        try:
            size = int.from_bytes(await self._reader.readexactly(HEAD))
            message: tuple[Any, ...] = pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError, pickle.UnpicklingError):
            return None
        return message

    def close(self) -> None:
        """Closes this end."""
        self._writer.close()
