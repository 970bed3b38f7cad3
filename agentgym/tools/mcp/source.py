"""The tools of an MCP server as an episode has them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import cast

from agentgym.errors import ConfigError, ToolFailure
from agentgym.extras import install_extra
from agentgym.refusals import Secrets
from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.tools.calling.definition import Tool
from agentgym.tools.calling.foreign_tools import fit_names, make_tools
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

        `names` selects tools, None for all that can be offered; `prefix` goes before their names, if two servers have
        tools of one name. Characters of a name that models and endpoints do not take become `_`.
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
        return self._make_tools(await self._link.open(), self._link)

    def _make_tools(self, listed: Sequence[ToolSpec], link: McpLink) -> list[Tool]:
        counts = Counter(spec.name for spec in listed)
        specs = {spec.name: spec for spec in reversed(listed)}
        model_names = dict(zip(counts, fit_names(self._prefix + name for name in counts), strict=True))
        makers = {name: partial(self._tool, specs[name], model_names[name], link) for name in counts}
        aliases = dict(zip(fit_names(counts), counts, strict=True))
        repeated = [f"tool {name!r}: the first of {count} is offered" for name, count in counts.items() if count > 1]
        return make_tools(f"the MCP server `{self.server}`", makers, self._names, aliases, repeated)

    def _tool(self, spec: ToolSpec, model_name: str, link: McpLink) -> Tool:
        secrets = Secrets(self.server.headers, {})

        async def call(**arguments: JSON) -> str:
            try:
                return secrets.mask_secrets(as_text(await _elsewhere(lambda: link.call(spec.name, arguments))))
            except ToolFailure as failure:
                raise ToolFailure(secrets.mask_secrets(str(failure)), kind=failure.kind) from None

        tries = 2 if self.server.stateless else 1
        limit_s = self.server.start_timeout_s + tries * (self.server.call_timeout_s + BACKSTOP_S)
        return Tool(spec=replace(spec, name=model_name), fn=call, timeout_s=limit_s, owner=self, on_error="raise")


async def _elsewhere(call: Callable[[], Awaitable[Mapping[str, object]]]) -> Mapping[str, object]:
    """Runs `call` on the servers' loop, whichever loop this is awaited on, and returns its result."""

    async def there() -> Mapping[str, object]:
        return await call()

    return await asyncio.wrap_future(_loop.submit(there()))


def _connector(server: McpServer) -> Callable[[], McpLink]:
    try:
        module = import_module("agentgym.tools.mcp.connection")
    except ModuleNotFoundError as error:
        raise ConfigError(f"MCP servers need the package mcp ({error}): {install_extra('mcp')}") from error
    return cast("Callable[[], McpLink]", lambda: module.Connection(server))
