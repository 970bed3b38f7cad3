"""Finds a tool by what a user writes: a registered name, `package.module:function`, or `path/to/file.py:function`."""

from __future__ import annotations

from agentgym.errors import UnknownName
from agentgym.loading import Wanted, is_code_path, load_named
from agentgym.tools.calling.definition import MARK, TOOLS, Tool, ToolFunction, as_tool

__all__ = ["find_tool", "resolve_tool"]

TOOL = Wanted(
    noun="tool",
    example="function",
    hint="`agentgym new tool NAME` writes a tool to start from.",
    fits=lambda value: callable(value) or isinstance(value, Tool),
)


def resolve_tool(name: str) -> Tool:
    """Returns the tool of that name or location.

    Raises UnknownName if there is none, ToolSchemaError if no schema can be derived, and UserCodeFault if the module
    raises as it is loaded.
    """
    if not is_code_path(name):
        return TOOLS[name]
    function: ToolFunction = load_named(name, TOOL)  # type: ignore[assignment]  # as_tool reports what is wrong
    return as_tool(function)


def find_tool(name: str) -> Tool | None:
    """Returns the tool of that name or location; None if there is none, or something else, like an environment."""
    if name in TOOLS:
        return TOOLS[name]
    if ":" not in name:
        return None
    try:
        target = load_named(name, TOOL)
    except UnknownName:
        return None
    return as_tool(target) if isinstance(target, Tool) or isinstance(getattr(target, MARK, None), Tool) else None  # type: ignore[arg-type]
