"""A server with state: a counter, and ways to go wrong. Over HTTP with `--http PORT`, a counter for each session."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any, Literal

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("counter")
counts: dict[object, int] = {}


def whose(context: Context[Any, Any]) -> object:
    """The session, where a server has many of them: over HTTP."""
    return (context.headers or {}).get("mcp-session-id")


@server.tool(structured_output=False)
def add(context: Context[Any, Any], amount: int = 1) -> str:
    """Adds to the counter."""
    who = whose(context)
    counts[who] = counts.get(who, 0) + amount
    return str(counts[who])


@server.tool(structured_output=False)
def go(context: Context[Any, Any], direction: Literal["north", "east", "south", "west"]) -> str:
    """Walk through an exit."""
    return f"You walk {direction}. Step {add(context)}."


@server.tool(structured_output=False)
def pid() -> str:
    """Tells the process."""
    return str(os.getpid())


@server.tool()
def sums(numbers: list[int]) -> dict[str, int]:
    """Adds numbers; the answer has a structure."""
    return {"total": sum(numbers)}


@server.tool(structured_output=False)
def picture() -> Image:
    """Gives an image."""
    return Image(data=b"\x89PNG", format="png")


@server.tool(structured_output=False)
def refuse(reason: str) -> str:
    """Fails, and says why."""
    raise ValueError(reason)


@server.tool(structured_output=False)
def crash() -> str:
    """Ends the server."""
    print("out of cheese", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool(structured_output=False)
async def hang() -> str:
    """Stops the server's only loop."""
    time.sleep(3600)
    return "never"


@server.tool(structured_output=False)
async def nap(seconds: float) -> str:
    """Takes its time, and lets others have theirs."""
    await anyio.sleep(seconds)
    return "rested"


@server.tool(structured_output=False)
async def meet(num_calls: int) -> str:
    """Answers once so many calls of it are here at a time."""
    counts["meet"] = counts.get("meet", 0) + 1
    while counts["meet"] < num_calls:
        await anyio.sleep(0.001)
    return "met"


@server.tool(structured_output=False)
def secret(variable: str) -> str:
    """Tells an environment variable."""
    return os.environ.get(variable, "unset")


@server.tool(structured_output=False)
def daemon() -> str:
    """Leaves a process behind, in a session of its own."""
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    return str(child.pid)


@server.tool(structured_output=False)
def long(chars: int) -> str:
    """Answers at length."""
    return "y" * chars


if __name__ == "__main__":
    if sys.argv[1:2] == ["--http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
