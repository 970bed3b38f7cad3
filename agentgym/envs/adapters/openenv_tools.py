"""The tools of an OpenEnv server whose actions are MCP calls: their list, and the text of a result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentgym.errors import ConfigError, EnvironmentFault, ToolFailure
from agentgym.tools.mcp.content import as_text
from agentgym.types import JSON, ToolSpec

__all__ = ["LIST_TOOLS", "call_of", "result_text", "takes_calls", "tool_specs"]

LIST_TOOLS: dict[str, JSON] = {"type": "list_tools"}
"""The action that asks for the tools."""
ERROR_TYPES = ("execution_error", "invalid_args", "tool_not_found")
"""Types of tool errors that the model's call caused or can react to; the others are failures of the server."""


def takes_calls(properties: Mapping[str, JSON]) -> bool:
    """True if an action with these properties is OpenEnv's `CallToolAction` or `ListToolsAction`."""
    kind = properties.get("type")
    return isinstance(kind, Mapping) and kind.get("const") in ("call_tool", "list_tools")


def call_of(name: str, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
    """The action that calls a tool."""
    return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def tool_specs(url: str, observation: Mapping[str, Any]) -> list[ToolSpec]:
    """The tools in the answer to `LIST_TOOLS`. Raises ConfigError if there are none."""
    listed = observation.get("tools") or ()
    if not listed:
        reason = (observation.get("metadata") or {}).get("error", "the list is empty")
        raise ConfigError(
            f"the OpenEnv server at {url} takes tool calls and lists no tools ({reason}): nothing to play"
        )
    return [
        ToolSpec(tool["name"], tool.get("description") or tool["name"], {"type": "object", **tool["input_schema"]})
        for tool in listed
    ]


def result_text(observation: Mapping[str, Any]) -> str:
    """The text of a tool's result.

    Raises ToolFailure for an error that answers the model's call, EnvironmentFault for a failure of the server.

    >>> result_text({"tool_name": "add", "result": {"content": [{"type": "text", "text": "7"}], "is_error": False}})
    '7'
    """
    error = observation.get("error")
    if error:
        message = str(error.get("message") or error)
        if error.get("error_type") in ERROR_TYPES:
            raise ToolFailure(message)
        raise EnvironmentFault(f"tool {observation.get('tool_name')!r} of the OpenEnv server failed: {message}")
    result = observation.get("result")
    if isinstance(result, str):
        return result
    if not isinstance(result, Mapping) or "content" not in result:
        return json.dumps(result, ensure_ascii=False)
    # The server writes the fields of MCP in snake case, or in camel case, depending on its version.
    structured = result.get("structured_content", result.get("structuredContent"))
    content = {} if structured is None else {"structuredContent": structured}
    return as_text({**result, **content, "isError": result.get("is_error", result.get("isError"))})
