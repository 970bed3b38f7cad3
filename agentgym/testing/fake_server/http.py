"""The HTTP side of a fake server: answers, streams, broken connections, and an end like that of a killed process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web

from agentgym.http_guard import READING, HttpGuard, RequestRejected, choose_token, listen, parse_json_object

__all__ = ["Endpoint", "FakeHost", "HttpAnswer", "HttpCall", "HttpStream"]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request: its JSON body (an empty object if there is none) and its query."""

    body: Mapping[str, Any]
    query: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer: `content` is JSON, or text, or None for an empty one."""

    content: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    dropped: bool = False
    """True if the connection closes half way."""

    def encode_body(self) -> bytes:
        """Returns the body."""
        if self.content is None:
            return b""
        text = self.content if isinstance(self.content, str) else json.dumps(self.content, separators=(",", ":"))
        return text.encode()


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer in server-sent events; an event that is None closes the connection."""

    events: AsyncIterator[str | None]


Endpoint: TypeAlias = Callable[[HttpCall], Awaitable["HttpAnswer | HttpStream"]]


class FakeHost:
    """Serves endpoints by path on one port, on the running event loop."""

    def __init__(
        self, endpoints: Mapping[str, Endpoint], host: str, port: int, *, guard: HttpGuard | None = None
    ) -> None:
        self._endpoints = endpoints
        self._host, self._port = host, port
        self._guard = guard or HttpGuard(host, token=choose_token(host))
        self._runner: web.ServerRunner | None = None

    async def start(self) -> str:
        """Begins to listen and returns the URL; raises ConfigError if it cannot."""
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            request_factory=_request,
            keepalive_timeout=self._guard.limits.idle_s,
            **READING,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=0.2)
        await self._runner.setup()
        return await listen(self._runner, self._guard, self._host, self._port, backlog=8192)

    async def kill(self) -> None:
        """Stops listening and closes every connection at once, in the middle of what it carries."""
        runner = self._runner
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        for connection in runner.server.connections if runner.server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()

    async def close(self) -> None:
        """Stops; a second call does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            await self._guard.admit(request)
            body = parse_json_object(await request.read())
        except RequestRejected as refusal:
            return _response(_refusal_answer(refusal))
        endpoint = self._endpoints.get(request.path)
        if endpoint is None:
            return _response(HttpAnswer({"detail": "Not Found"}, 404))
        answer = await endpoint(HttpCall(body, request.query))
        if isinstance(answer, HttpStream):
            return await _send_stream(request, answer)
        return await _send_half(request, answer) if answer.dropped else _response(answer)


def _request(*parts: Any) -> web.BaseRequest:
    """Returns a request without a limit of its size: a bucket of weights is large."""
    message, payload, protocol, writer, task = parts
    return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=0)


def _response(answer: HttpAnswer) -> web.Response:
    kind = "text/plain" if isinstance(answer.content, str) else "application/json"
    return web.Response(body=answer.encode_body(), status=answer.status, headers=answer.headers, content_type=kind)


def _refusal_answer(refusal: RequestRejected) -> HttpAnswer:
    status, message = refusal.status, str(refusal)
    if refusal.code == "invalid_json":
        message = f"1 validation error: JSON decode error: {message}"
    error = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": status}
    return HttpAnswer(error, status)


async def _send_half(request: web.BaseRequest, answer: HttpAnswer) -> web.StreamResponse:
    body = answer.encode_body()
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    _close(request)
    return response


async def _send_stream(request: web.BaseRequest, stream: HttpStream) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    async for event in stream.events:
        if event is None:
            _close(request)
            return response
        await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response


def _close(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.close()
