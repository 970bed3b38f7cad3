"""Our addition to vLLM's HTTP server, in vLLM's own process: refuses requests without the server's secret.

Given to vLLM as `--middleware`, as a file of its own: it imports nothing of agentgym. vLLM's own `--api-key` would be
visible in the list of processes, and covers few of its routes: not `/collective_rpc`, `/pause` or `/inference`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

__all__ = ["RequireSecret"]

VARIABLE = "AGENTGYM_SERVER_SECRET"
_Send = Callable[[dict[str, Any]], Awaitable[None]]
_App = Callable[[Mapping[str, Any], Any, _Send], Awaitable[None]]


class RequireSecret:
    """ASGI middleware: every request has `Authorization: Bearer SECRET`, or is answered 401.

    The secret is the environment variable AGENTGYM_SERVER_SECRET; raises RuntimeError without one.
    """

    def __init__(self, app: _App) -> None:
        secret = os.environ.get(VARIABLE)
        if not secret:
            raise RuntimeError(f"the environment variable {VARIABLE} holds no secret")
        self._app = app
        self._header = f"Bearer {secret}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: _Send) -> None:
        """Passes on requests that have the secret, and the server's own start and end."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"this server needs the secret of who launched it\n"})

    def _is_allowed(self, scope: Mapping[str, Any]) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._header)
