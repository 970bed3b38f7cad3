"""Engines that sample token ids: in this process, on SGLang or vLLM servers, and chat endpoints."""

from typing import TYPE_CHECKING

from agentgym.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentgym.engines.local.config import LocalEngineConfig
    from agentgym.engines.local.engine import LocalEngine
    from agentgym.engines.openai import ChatEndpoint, ChatEndpointConfig
    from agentgym.engines.protocol import Sampling

__all__ = ["ChatEndpoint", "ChatEndpointConfig", "LocalEngine", "LocalEngineConfig", "Sampling"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ChatEndpoint": "openai",
        "ChatEndpointConfig": "openai",
        "LocalEngine": "local.engine",
        "LocalEngineConfig": "local.config",
        "Sampling": "protocol",
    },
)
