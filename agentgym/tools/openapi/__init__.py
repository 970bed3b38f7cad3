"""Tools from an OpenAPI document: an operation each, called over HTTP."""

from agentgym.tools.openapi.tools import openapi_tools

__all__ = ["openapi_tools"]
