"""Tools: functions that a model may call, with their JSON Schemas and their execution."""

if __name__ != "agentgym.tools":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.tools instead")

from agentgym.tools.calling.commands import read_calls
from agentgym.tools.calling.definition import TOOLS, Tool, as_tool, register_tool, tool
from agentgym.tools.calling.resolve import resolve_tool
from agentgym.tools.calling.runner import ToolRunner
from agentgym.tools.calling.source import ToolSource
from agentgym.tools.calling.worker import Worker, run_sync

__all__ = [
    "TOOLS",
    "Tool",
    "ToolRunner",
    "ToolSource",
    "Worker",
    "as_tool",
    "read_calls",
    "register_tool",
    "resolve_tool",
    "run_sync",
    "tool",
]
