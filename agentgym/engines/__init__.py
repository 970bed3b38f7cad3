"""Engines that sample token ids: in this process, on SGLang or vLLM servers, and chat endpoints."""

from typing import TYPE_CHECKING

from agentgym.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentgym.engines.local.config import LocalEngineConfig
    from agentgym.engines.local.engine import LocalEngine
    from agentgym.engines.openai import ChatEndpoint, ChatEndpointConfig
    from agentgym.engines.protocol import Sampling
    from agentgym.engines.server_kind import SERVERS, ServerKind
    from agentgym.engines.servers.server_config import ServerConfig

__all__ = [
    "SERVERS",
    "ChatEndpoint",
    "ChatEndpointConfig",
    "LocalEngine",
    "LocalEngineConfig",
    "Sampling",
    "ServerConfig",
    "ServerKind",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "SERVERS": "server_kind",
        "ChatEndpoint": "openai",
        "ChatEndpointConfig": "openai",
        "LocalEngine": "local.engine",
        "LocalEngineConfig": "local.config",
        "Sampling": "protocol",
        "ServerConfig": "servers.server_config",
        "ServerKind": "server_kind",
    },
)
