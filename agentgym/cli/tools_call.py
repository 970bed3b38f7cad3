"""`agentgym tools call`: runs a tool once, and shows what a model would be answered."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import tyro

from agentgym.cli.options import parse_options
from agentgym.cli.terminal import fail, say, show_json
from agentgym.errors import ConfigError
from agentgym.tools import ToolRunner, read_calls
from agentgym.tools.calling.definition import Tool
from agentgym.tools.calling.resolve import resolve_tool
from agentgym.tools.mcp import McpTools
from agentgym.types import AnyCall, ToolResult

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Runs a tool once and shows the answer as a model would read it; exit code 1 if the answer is an error."""

    tool: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TOOL")]
    """path/to/file.py:function or package.module:function; with --mcp, a tool's name."""
    arguments: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME=VALUE ...]")] = ()
    """The tool's arguments, each read by the type that its schema gives it; or one JSON object."""
    mcp: Annotated[str | None, tyro.conf.arg(metavar="SERVER")] = None
    """The MCP server that has the tool: its command line, such as "python server.py", or its URL."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym tools call ...`."""
    options = parse_options(CallOptions, args, prog="agentgym tools call")
    if options.mcp is None:
        result = _call_tool(resolve_tool(options.tool), options.arguments)
    else:
        with closing(McpTools(options.mcp, names=[options.tool])) as source:
            (tool,) = source.open()
            result = _call_tool(tool, options.arguments)
    if result.error is None:
        say(result.content)
    else:
        fail(result.content)
    if options.json:
        show_json({"tool": result.name, "content": result.content, "error": result.error})
    return 0 if result.error is None else 1


def _call_tool(tool: Tool, words: Sequence[str]) -> ToolResult:
    return asyncio.run(_answer(tool, _read(tool, words)))


def _read(tool: Tool, words: Sequence[str]) -> AnyCall:
    typed = words[0] if len(words) == 1 and words[0].startswith("{") else shlex.join(words)
    calls = read_calls(f"{tool.name} {typed}", {tool.name: tool.spec})
    if not calls:
        names = ", ".join(f"{name}=..." for name in _parameters(tool))
        raise ConfigError(f"NAME=VALUE was wanted, got {typed}; {tool.name} takes {names or 'nothing'}")
    return calls[0]


def _parameters(tool: Tool) -> list[str]:
    properties = tool.spec.parameters.get("properties", {})
    return list(properties) if isinstance(properties, dict) else []


async def _answer(tool: Tool, call: AnyCall) -> ToolResult:
    runner = ToolRunner([tool])
    try:
        (result,) = await runner.run([call])
    finally:
        runner.close()
    return result
