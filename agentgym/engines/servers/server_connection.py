"""The connection to a server of an engine, and the servers of a configuration."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agentgym.engines.servers.http import SERVER_SECRET, HttpClient, secret_headers, server_address
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import ServerProcess

__all__ = ["ServerConnection", "connect_servers"]


class ServerConnection(HttpClient):
    """An `HttpClient` of one server: one that runs, or one that was launched (`process`) and ends with it."""

    def __init__(self, url: str, process: ServerProcess | None = None, *, secret: str = "") -> None:
        super().__init__(server_address(url), headers=secret_headers(secret))
        self.process = process

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return self.base_url

    @property
    def gpus(self) -> Sequence[str] | None:
        """The GPUs that it sees, its own first; None if it was not launched here."""
        return None if self.process is None else self.process.command.gpus

    async def close(self) -> None:
        """Closes the connections, and ends the server if it was launched here."""
        await super().close()
        if self.process is not None:
            await self.process.close()


C = TypeVar("C", bound=ServerConnection)


async def connect_servers(
    config: ServerConfig, launch: Callable[[], Awaitable[Sequence[ServerProcess]]], connect: Callable[..., C]
) -> list[C]:
    """Returns connections to the running servers of a configuration, or to new ones that `launch` starts.

    `connect` is a subclass of ServerConnection, or that itself.
    """
    if config.urls:
        return [connect(url, secret=os.environ.get(SERVER_SECRET, "")) for url in config.urls]
    return [connect(process.url, process, secret=process.command.secret) for process in await launch()]
