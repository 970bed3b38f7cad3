"""`agentgym tools list`: the tools of an environment or an MCP server, one tool, or all bundled and registered ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from agentgym.cli.display.tables import show_table
from agentgym.cli.environment import load_env
from agentgym.cli.options import env_as_argument, parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.envs.catalog.plugin import BUNDLED
from agentgym.errors import ConfigError
from agentgym.tools.calling.definition import TOOLS
from agentgym.tools.calling.resolve import find_tool
from agentgym.tools.mcp import McpTools
from agentgym.types import JSON, ToolSpec

__all__ = ["main", "tool_rows"]


@dataclass(frozen=True, kw_only=True)
class ToolsListOptions:
    """Lists an environment's tools as a model sees them; without one, those of all bundled environments."""

    env: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[ENV]")] = None
    """Environment id, package.module:Class or path/to/file.py:Class; or path/to/file.py:function, a tool."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""
    mcp: Annotated[str | None, tyro.conf.arg(metavar="SERVER")] = None
    """The tools of an MCP server instead: its command line, such as "python server.py", or its URL."""
    json: bool = False
    """End with one line of JSON: the tools with their whole schemas."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym tools list ...`."""
    options = parse_options(ToolsListOptions, env_as_argument(args), prog="agentgym tools list")
    specs = _list_specs(options)
    if specs:
        owned = options.mcp is None
        rows = [[*([owner] if owned else []), *row] for owner, spec in specs for row in tool_rows([spec])]
        show_table([*(["of"] if owned else []), "tool", "parameters", "what it does"], rows)
    else:
        say(f"{options.mcp} has no tools" if options.mcp else f"{options.env} has no tools: it is played by text")
    if options.json:
        tools: list[JSON] = [{"env": owner, **spec.to_openai()} for owner, spec in specs]
        show_json({"tools": tools})
    return 0


def _list_specs(options: ToolsListOptions) -> list[tuple[str, ToolSpec]]:
    """Returns each tool, after the name of its owner."""
    if options.mcp is not None:
        if options.env is not None:
            raise ConfigError(f"the tools of one thing are listed: {options.env!r} or --mcp {options.mcp!r}, not both")
        with closing(McpTools(options.mcp)) as source:
            return [(options.mcp, tool.spec) for tool in source.open()]
    if options.env is not None:
        return [(options.env, spec) for spec in _tools_of(options.env, options.env_kwargs)]
    bundled = [(env_id, spec) for env_id in BUNDLED for spec in _tools_of(env_id, {})]
    return bundled + [("registered", tool.spec) for tool in TOOLS.values()]


def _tools_of(env_name: str, kwargs: Mapping[str, JSON]) -> tuple[ToolSpec, ...]:
    if (tool := find_tool(env_name)) is not None:
        return (tool.spec,)
    env = load_env(env_name, kwargs)
    try:
        env.reset(seed=0)  # tools that belong to an episode exist only within one
        return env.tool_specs
    finally:
        env.close()


def tool_rows(specs: Sequence[ToolSpec]) -> list[list[str]]:
    """Returns name, parameters and description of each tool."""
    return [[spec.name, _parameters(spec), spec.description.partition("\n\n")[0]] for spec in specs]


def _parameters(spec: ToolSpec) -> str:
    schema: Mapping[str, Any] = spec.parameters
    required = schema.get("required", ())
    return ", ".join(
        f"{name}{'' if name in required else '?'}: {_kind(part)}" for name, part in schema.get("properties", {}).items()
    )


def _kind(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "anything"
    if "enum" in schema:
        return "|".join(str(choice) for choice in schema["enum"])
    union = schema.get("anyOf") or schema.get("oneOf")
    if union:
        return " or ".join(_kind(part) for part in union)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    kind = schema.get("type", str(schema.get("$ref", "anything")).rpartition("/")[2])
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
