"""`agentgym tools mcp`: an episode's tools for an agent that starts MCP servers as commands."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import tyro

from agentgym.cli.options import parse_options
from agentgym.cli.terminal import fail
from agentgym.errors import NOT_JSON, ConfigError
from agentgym.http_guard import TOKEN_VARIABLE
from agentgym.types import JSON

__all__ = ["main"]

DRAIN_S = 10.0
"""The seconds that answers may take after the end of standard input."""
NO_ANSWER = -32000
"""JSON-RPC's code for a server that gives no answer."""


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    """Passes MCP messages from standard input on to a URL, and the answers to standard output."""

    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")]
    """The URL of a served episode's tools: its `root_url`, and /mcp."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym tools mcp ...`, until standard input ends."""
    options = parse_options(McpOptions, args, prog="agentgym tools mcp")
    if urlsplit(options.url).scheme not in ("http", "https"):
        raise ConfigError(f"URL begins with http:// or https://, got {options.url!r:.80}")
    asyncio.run(_pass_on(options.url))
    return 0


async def _pass_on(url: str) -> None:
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read_lines, args=(loop, lines), daemon=True).start()
    path = urlsplit(url).path.split("/")
    episode = path[path.index("episodes") + 1] if "episodes" in path[:-1] else ""
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    if key := os.environ.get(TOKEN_VARIABLE, "").strip() or episode:
        headers["Authorization"] = f"Bearer {key}"
    no_limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(headers=headers, timeout=no_limit) as http:
        calls: set[asyncio.Task[None]] = set()
        while line := await lines.get():
            if b'"tools/call"' in line:  # side by side: a call may take long
                calls.add(asyncio.create_task(_forward(http, url, line)))
            elif line.strip():
                await _forward(http, url, line)
            calls = {call for call in calls if not call.done()}
        if calls:
            await asyncio.wait(calls, timeout=DRAIN_S)
        if "Mcp-Session-Id" in http.headers:
            with suppress(aiohttp.ClientError, TimeoutError):
                await http.delete(url, timeout=aiohttp.ClientTimeout(total=DRAIN_S))


def _read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[bytes]) -> None:
    """Reads standard input, of whatever kind it is; an empty line at its end."""
    with suppress(RuntimeError):  # the loop is closed
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, b"")


async def _forward(http: aiohttp.ClientSession, url: str, line: bytes) -> None:
    """Sends a message and writes its answer; a request without one is answered with an error."""
    try:
        async with http.post(url, data=line) as response:
            body = await response.read()
            answer: Any = json.loads(body) if body else None
            if number := response.headers.get("Mcp-Session-Id"):
                version = answer["result"]["protocolVersion"]
                http.headers.update({"Mcp-Session-Id": number, "MCP-Protocol-Version": version})
    except (aiohttp.ClientError, TimeoutError, *NOT_JSON, KeyError, TypeError) as error:
        reason = f"{url} gave no answer: {str(error) or type(error).__name__}"
        answer = {"jsonrpc": "2.0", "id": None, "error": {"code": NO_ANSWER, "message": reason}}
    if isinstance(answer, dict) and answer.get("id") is None:
        answer["id"] = _request_id(line)
        fail(answer["error"]["message"])
        if answer["id"] is None:  # a notification is answered with nothing
            return
    if answer is not None:
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _request_id(line: bytes) -> JSON:
    try:
        request: JSON = json.loads(line)
    except NOT_JSON:
        return None
    return request.get("id") if isinstance(request, dict) else None
