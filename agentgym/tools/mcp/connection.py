"""One connection to an MCP server, through the official SDK: the only file that imports the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client import Transport
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT
from pydantic_core import to_json

from agentgym.child_guard import guard_command
from agentgym.errors import EnvironmentFault, ToolFailure
from agentgym.proxies import proxy_for
from agentgym.tools.mcp.link import ServerLost
from agentgym.tools.mcp.server import McpServer
from agentgym.tools.mcp.stderr_tail import StderrTail
from agentgym.types import JSON, ToolSpec

__all__ = ["Connection"]

PING_S = 5.0
"""The seconds that a server has to answer a ping after it has not answered a call."""
CLOSE_S = 3.5
"""The seconds until a server that was asked to end is left to its guard."""
MAX_PAGES = 100
NOT_THE_MODEL_S = (401, 403, 407, 408, 429)
"""Refusals over HTTP that are not about a call."""
FAILURES = (
    MCPError,
    OSError,
    TimeoutError,
    ValueError,
    RuntimeError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    httpx2.HTTPError,
    ExceptionGroup,
)
"""The errors that the SDK raises for servers that misbehave."""


class Connection:
    """A session with a server, which has its own process if the server is a command.

    One task of the loop enters the SDK's contexts and leaves them again, as their cancel scopes require. Calls come
    from any task of that loop, several at once.
    """

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.is_lost = False
        self._specs: asyncio.Future[Sequence[ToolSpec]] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._stderr = StderrTail()
        self._refusal = ""
        self._listed: list[ToolSpec] = []
        self._unreadable: list[str] = []
        """Why the SDK could not read the server's last message that it could not, if there was one."""
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None

    async def open(self) -> Sequence[ToolSpec]:
        self._task = asyncio.create_task(self._hold())
        return await asyncio.shield(self._specs)

    async def close(self) -> None:
        self._closing.set()
        if self._task is None:
            return
        if not self._specs.done():
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSE_S)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> Mapping[str, object]:
        client, limit_s = self._client, self.server.call_timeout_s
        if client is None or self.is_lost:
            raise self._mark_lost(f"is gone: {name!r} cannot be called")
        _check_sendable(name, arguments)
        try:
            result = await client.call_tool(name, dict(arguments), read_timeout_seconds=limit_s)
        except MCPError as error:
            raise await self._explain_error(error, name) from None
        except FAILURES as error:
            if await self._is_alive():
                raise EnvironmentFault(f"the MCP server `{self.server}` answered {name!r} wrongly: {error}") from error
            raise self._mark_lost(f"ended during a call of {name!r}") from None
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)

    async def _explain_error(self, error: MCPError, name: str) -> ToolFailure | ServerLost:
        """Returns an error for the model if the server is alive, else the error that the server is lost."""
        alive = await self._is_alive()
        if error.code == REQUEST_TIMEOUT:
            reason = f"{name} gave no answer within {self.server.call_timeout_s:g} s"
            reason += self._format_unreadable()
            if alive:
                return ToolFailure(reason, kind="timeout")
            return self._mark_lost(f"hangs, and was ended: {reason}, and it answers no ping")
        if alive:
            return ToolFailure(f"{name} failed: {error.message}")
        if error.code == CONNECTION_CLOSED:
            return self._mark_lost(f"ended during a call of {name!r}")
        return self._mark_lost(f"failed during a call of {name!r}: {error.message}")

    async def _is_alive(self) -> bool:
        """Returns whether the server answers a ping."""
        if self._client is None:
            return False
        try:
            async with asyncio.timeout(PING_S):
                await self._client.session.send_ping()
        except FAILURES:
            return False
        return True

    def _mark_lost(self, what: str) -> ServerLost:
        self.is_lost = True
        self._closing.set()
        answered = f": {self._refusal}" if self._refusal and self._refusal not in what else ""
        return ServerLost(f"the MCP server `{self.server}` {what}{answered}{self._stderr.format_tail()}")

    async def _hold(self) -> None:
        """Enters the session, stays until it is to be closed, and leaves it: all in this one task."""
        try:
            async with asyncio.timeout(self.server.start_timeout_s) as start, self._session() as client:
                await _list_pages(client)
                specs = tuple(self._listed)
                start.reschedule(None)
                self._client = client
                self._specs.set_result(specs)
                await self._closing.wait()
        except FAILURES as error:
            if not self._specs.done():
                self._specs.set_exception(self._mark_lost(self._not_started(error)))
        finally:
            self._client = None
            self.is_lost = True
            self._stderr.close()
            if not self._specs.done():
                self._specs.cancel()

    def _format_unreadable(self) -> str:
        return "".join(f"; the server sent a message that cannot be read: {why}" for why in self._unreadable)

    def _not_started(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"listed no tools within {self.server.start_timeout_s:g} s, and was ended{self._format_unreadable()}"
        innermost: BaseException = error
        while isinstance(innermost, BaseExceptionGroup):
            innermost = innermost.exceptions[0]
        if isinstance(innermost, MCPError) and innermost.code == CONNECTION_CLOSED and not self.server.url:
            return "ended before it listed its tools"
        return f"could not be {'reached' if self.server.url else 'started'}: {innermost}"

    async def _check_status(self, response: httpx2.Response) -> None:
        """Ends the session if the service fails, or denies access: the SDK would report that as a tool's error.

        An answer that is a message of the protocol is the server's answer to the call; the SDK reads that.
        """
        status = response.status_code
        if response.request.method != "POST" or (status < 500 and status not in NOT_THE_MODEL_S):
            return
        if b'"jsonrpc"' not in await response.aread():
            self._refusal = f"it answered {status} {response.reason_phrase}"
            raise httpx2.HTTPStatusError(self._refusal, request=response.request, response=response)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Client]:
        if self.server.url:
            limits = httpx2.Timeout(self.server.start_timeout_s, read=self.server.call_timeout_s + PING_S)
            hooks = {"response": [self._check_status]}
            directly = {} if proxy_for(self.server.url) else dict.fromkeys(("http://", "https://", "all://"))
            async with (
                httpx2.AsyncClient(
                    headers=dict(self.server.headers), timeout=limits, event_hooks=hooks, mounts=directly
                ) as http,
                Client(
                    self._read_lists(streamable_http_client(self.server.url, http_client=http)), mode="legacy"
                ) as client,
            ):
                yield client
            return
        with self._stderr.writing() as errlog:
            program, *args = guard_command("stdio", self.server.command)
            parameters = StdioServerParameters(
                command=program, args=args, env=dict(self.server.env), cwd=self.server.cwd
            )
            async with Client(self._read_lists(stdio_client(parameters, errlog)), mode="legacy") as client:
                errlog.close()
                yield client

    @asynccontextmanager
    async def _read_lists(self, transport: Transport) -> AsyncIterator[tuple[Any, Any]]:
        async with transport as (reading, writing):
            yield _ListReader(reading, self._listed, self._unreadable), writing


class _ListReader(anyio.abc.ObjectReceiveStream[Any]):
    """Reads the tools of a page as the server lists them: the SDK refuses a whole page for one tool that is wrong."""

    def __init__(self, stream: Any, listed: list[ToolSpec], unreadable: list[str]) -> None:
        self._stream, self._listed, self._unreadable = stream, listed, unreadable

    async def receive(self) -> Any:
        """Returns the next message, without what the SDK refuses."""
        message = await self._stream.receive()
        if isinstance(message, Exception):
            self._unreadable[:] = [" ".join(str(message).split())[:200]]
        result = getattr(getattr(message, "message", None), "result", None)
        if isinstance(result, dict) and isinstance(result.get("tools"), list) and "content" not in result:
            specs = [_spec_of(tool if isinstance(tool, dict) else {}) for tool in result["tools"]]
            self._listed += specs
            result["tools"] = [{"name": spec.name, "inputSchema": {"type": "object"}} for spec in specs]
        return message

    async def aclose(self) -> None:
        """Closes the stream."""
        await self._stream.aclose()


def _spec_of(tool: Mapping[str, Any]) -> ToolSpec:
    """Returns a listed tool, whatever its parts are: `Tool` refuses it by name."""
    name, schema = tool.get("name"), tool.get("inputSchema")
    if isinstance(schema, dict):
        schema = {"type": "object", **schema}
    text = str(tool.get("description") or "")
    return ToolSpec(name if isinstance(name, str) else "", text, schema)  # type: ignore[arg-type]


def _check_sendable(name: str, arguments: Mapping[str, JSON]) -> None:
    """Refuses arguments that would break the session when written: lone surrogates, and lists nested too deeply."""
    try:
        to_json([[[[arguments]]]])  # as deep as in a message
    except ValueError as error:
        raise ToolFailure(f"{name} was not called, for its arguments cannot be sent: {error}") from None


async def _list_pages(client: Client) -> None:
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        cursor = (await client.list_tools(cursor=cursor)).next_cursor
        if cursor is None:
            return
    raise RuntimeError(f"it has more than {MAX_PAGES} pages of tools")
