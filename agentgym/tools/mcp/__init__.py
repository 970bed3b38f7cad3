"""Tools of MCP servers, with their schemas as given; one server for each episode, or one for all."""

from agentgym.tools.mcp.server import McpServer
from agentgym.tools.mcp.source import McpTools

__all__ = ["McpServer", "McpTools"]
