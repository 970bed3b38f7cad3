"""Tools by the texts that settings name them with: functions, schema files, MCP servers, OpenAPI, verl's files.

| Written | What it is |
|---|---|
| `path/to/file.py:name`, `package.module:name`, a registered name | a function, a Tool, or a list of them |
| `tools.json` | a list of OpenAI's schemas, each with `call`, the function that runs it, beside `function` |
| `servers.json` with `mcpServers` | MCP servers, as other clients configure them |
| `mcp:COMMAND`, `mcp:URL` | an MCP server |
| `openapi:DOCUMENT@URL`, `openapi:DOCUMENT@URL#NAME,NAME` | the operations of an OpenAPI 3 document, at a URL |
| `path/to/file.py:Class` | an environment of TRL, whose methods are tools |
| `tools.yaml` | verl's `tool_config_path`: classes with `create`, `execute` and `release` |
| `interaction.yaml` | verl's `interaction_config_path`: classes with `generate_response`, which answer plain replies |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.errors import NOT_JSON, ConfigError, UnknownName, nearest
from agentgym.loading import is_code_path, load_named
from agentgym.registry import Registry
from agentgym.tools.calling.definition import TOOLS, Tool, as_tool, register_tool
from agentgym.tools.calling.resolve import TOOL
from agentgym.tools.calling.source import ToolSource
from agentgym.tools.trl_environment import TrlEnvironment, is_trl_environment

__all__ = ["NamedTools", "named_tools"]

MCP, OPENAPI = "mcp:", "openapi:"


@dataclass(frozen=True)
class NamedTools:
    """Tools that exist already, and sources of those that an episode makes for itself."""

    tools: tuple[Tool, ...]
    sources: tuple[Callable[[], ToolSource], ...]


def named_tools(names: Sequence[str]) -> NamedTools:
    """Returns the tools of these texts; raises ConfigError, UnknownName or ToolSchemaError for what is none."""
    tools: list[Tool] = []
    sources: list[Callable[[], ToolSource]] = []
    for name in names:
        if name.startswith(MCP):
            sources.append(_mcp_source(name.removeprefix(MCP)))
        elif name.startswith(OPENAPI):
            tools += _openapi(name.removeprefix(OPENAPI))
        elif name.endswith((".json", ".yaml", ".yml")):
            entry_tools = _of_file(Path(name))
            tools, sources = [*tools, *entry_tools.tools], [*sources, *entry_tools.sources]
        else:
            entry_tools = _of_code_path(name)
            tools, sources = [*tools, *entry_tools.tools], [*sources, *entry_tools.sources]
    return NamedTools(tuple(tools), tuple(sources))


def _of_code_path(name: str) -> NamedTools:
    if not is_code_path(name):
        if name not in TOOLS:
            near = nearest(name, TOOLS) or "."
            raise UnknownName(f"unknown tool {name!r}{near} Write path/to/file.py:name, tools.json or mcp:COMMAND")
        return NamedTools((TOOLS[name],), ())
    target: Any = load_named(name, TOOL)
    if is_trl_environment(target):
        return NamedTools((), (partial(TrlEnvironment, target),))
    return NamedTools(tuple(as_tool(entry) for entry in (target if isinstance(target, list | tuple) else [target])), ())


def _mcp_source(server: str, **settings: Any) -> Callable[[], ToolSource]:
    from agentgym.tools.mcp import McpServer, McpTools  # here: it needs the library mcp

    config = McpServer(**settings) if settings else McpServer.of(server)
    return partial(McpTools, config)


def _openapi(text: str) -> list[Tool]:
    from agentgym.tools.openapi import openapi_tools

    document, at, url = text.rpartition("@")
    if not at:
        raise ConfigError(f"openapi:{text} lacks the address of the API: write openapi:DOCUMENT@URL")
    url, has_names, names = url.partition("#")
    return openapi_tools(document, url, names=names.split(",") if has_names else None)


def _of_file(path: Path) -> NamedTools:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the tools of {str(path)!r}: {error.strerror}") from error
    if path.suffix != ".json":
        from agentgym.tools.verl_tools import verl_file

        return NamedTools((), (verl_file(path, text),))
    try:
        content: object = json.loads(text)
    except NOT_JSON as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from error
    if isinstance(content, Mapping) and isinstance(servers := content.get("mcpServers"), Mapping):
        return NamedTools((), tuple(_of_server(path, name, entry) for name, entry in servers.items()))
    entries = content.get("tools") if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{str(path)!r} is a list of tools, or an object with tools or mcpServers")
    return NamedTools(tuple(_of_schema(path, number, entry) for number, entry in enumerate(entries)), ())


def _of_server(path: Path, name: str, entry: object) -> Callable[[], ToolSource]:
    """Returns the source of a server in the form of `mcpServers`: command and args, or url."""
    if not isinstance(entry, Mapping) or not ("command" in entry or "url" in entry):
        raise ConfigError(f"{str(path)!r}: server {name!r} has a command or a url, got {entry!r:.80}")
    if "url" in entry:
        return _mcp_source("", url=str(entry["url"]), headers=dict(entry.get("headers") or {}))
    words = (str(entry["command"]), *map(str, entry.get("args") or ()))
    return _mcp_source("", command=words, env=dict(entry.get("env") or {}), cwd=entry.get("cwd"))


def _of_schema(path: Path, number: int, entry: object) -> Tool:
    """Returns the tool of an OpenAI schema with `call`, whose path may be relative to the file."""
    call = entry.get("call") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(call, str):
        raise ConfigError(
            f"{str(path)!r}, tool {number}: `function` (the schema) and `call` (path/to/file.py:name, its code) were"
            f" wanted, got {entry!r:.80}"
        )
    file, _, name = call.rpartition(":")
    beside = path.parent / file
    code_path = f"{beside}:{name}" if file.endswith(".py") and beside.is_file() else call
    function: Any = load_named(code_path, TOOL)
    schema = {key: value for key, value in entry.items() if key != "call"}
    return register_tool(schema, function, registry=Registry("tool"))
