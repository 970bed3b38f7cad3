"""The tools of an MCP server as an episode has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import cast

from agentgym.errors import ConfigError, nearest
from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.tools.calling.definition import Tool
from agentgym.tools.mcp.content import as_text
from agentgym.tools.mcp.link import McpLink
from agentgym.tools.mcp.server import McpServer
from agentgym.tools.mcp.shared import SharedLink
from agentgym.types import JSON, ToolSpec

__all__ = ["McpTools"]

BACKSTOP_S = 15.0
"""The seconds beyond a call's own: the server is pinged, and ended if it does not answer."""
_loop = BackgroundLoop("agentgym-mcp")
_shared: dict[tuple[object, ...], SharedLink] = {}


class McpTools:
    """Gives an environment an MCP server's tools: `tool_sources=[lambda: McpTools("python server.py")]`.

    Each episode has its own server process, which ends with it, unless the server is `stateless`: then all episodes of
    a process share one. Over HTTP that applies to sessions. Descriptions and schemas are the server's, as they were
    when the episode began. The model reads a tool's results, errors included. A server that ends, hangs or cannot be
    reached is an EnvironmentFault with the end of its standard error, so that the episode does not count as a zero.
    """

    def __init__(self, server: McpServer | str, *, names: Sequence[str] | None = None, prefix: str = "") -> None:
        """`server` is an McpServer, a command line or a URL.

        `names` selects tools, None for all; `prefix` goes before their names, if two servers have tools of one name.
        """
        self.server = McpServer.of(server) if isinstance(server, str) else server
        self._names = None if names is None else tuple(names)
        self._prefix = prefix
        self._link: McpLink | None = None

    def open(self) -> Sequence[Tool]:
        """Starts or connects to the server."""
        connect = _connector(self.server)
        self.server.check_program()
        return _loop.submit(self._open_link(connect)).result()

    def close(self) -> None:
        """Ends this episode's server."""
        if self._link is not None:
            _loop.submit(self._link.close()).result()
            self._link = None

    async def _open_link(self, connect: Callable[[], McpLink]) -> Sequence[Tool]:
        if self.server.stateless:
            key = (os.getpid(), *self.server.identity)
            self._link = _shared.setdefault(key, SharedLink(connect))
        else:
            self._link = connect()
        specs = {spec.name: spec for spec in await self._link.open()}
        return [self._tool(spec, self._link) for spec in self._select_specs(specs)]

    def _select_specs(self, specs: Mapping[str, ToolSpec]) -> Sequence[ToolSpec]:
        if self._names is None:
            return list(specs.values())
        for name in self._names:
            if name not in specs:
                hint = nearest(name, specs) or f"; it has {', '.join(specs) or 'none'}"
                raise ConfigError(f"the MCP server `{self.server}` has no tool {name!r}{hint}")
        return [specs[name] for name in self._names]

    def _tool(self, spec: ToolSpec, link: McpLink) -> Tool:
        async def call(**arguments: JSON) -> str:
            return as_text(await _elsewhere(lambda: link.call(spec.name, arguments)))

        tries = 2 if self.server.stateless else 1
        limit_s = self.server.start_timeout_s + tries * (self.server.call_timeout_s + BACKSTOP_S)
        shown = ToolSpec(f"{self._prefix}{spec.name}", spec.description, spec.parameters)
        return Tool(spec=shown, fn=call, timeout_s=limit_s, owner=self, on_error="raise")


async def _elsewhere(call: Callable[[], Awaitable[Mapping[str, object]]]) -> Mapping[str, object]:
    """Runs `call` on the servers' loop, whichever loop this is awaited on, and returns its result."""

    async def there() -> Mapping[str, object]:
        return await call()

    return await asyncio.wrap_future(_loop.submit(there()))


def _connector(server: McpServer) -> Callable[[], McpLink]:
    try:
        module = import_module("agentgym.tools.mcp.connection")
    except ModuleNotFoundError as error:
        raise ConfigError(f"MCP servers need the package mcp ({error}): pip install 'agentgym-llm[mcp]'") from error
    return cast("Callable[[], McpLink]", lambda: module.Connection(server))
