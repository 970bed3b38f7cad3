"""Tools from an OpenAPI document: one for each operation, called over HTTP."""

from agentgym.tools.openapi.tools import openapi_tools

__all__ = ["openapi_tools"]
