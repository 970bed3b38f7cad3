"""Any chat endpoint that speaks OpenAI"s protocol."""

from agentgym.engines.openai.config import ChatEndpointConfig
from agentgym.engines.openai.endpoint import ChatEndpoint

__all__ = ["ChatEndpoint", "ChatEndpointConfig"]
