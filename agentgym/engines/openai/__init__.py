"""Any chat endpoint that speaks OpenAI's protocol; its client, and HTTP with it, is loaded when it is first used."""

from typing import TYPE_CHECKING

from agentgym.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentgym.engines.openai.config import ChatEndpointConfig
    from agentgym.engines.openai.endpoint import ChatEndpoint

__all__ = ["ChatEndpoint", "ChatEndpointConfig"]

__getattr__, __dir__ = lazy_exports(__name__, {"ChatEndpoint": "endpoint", "ChatEndpointConfig": "config"})
