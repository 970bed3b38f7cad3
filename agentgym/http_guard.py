"""The guard of every HTTP server in the package: which clients may send requests, in which form, and how slowly."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from agentgym.call_json import MAX_JSON_DEPTH, is_too_deep, no_constant, read_finite
from agentgym.errors import NOT_JSON, AgentGymError, ConfigError
from agentgym.proxies import is_loopback

__all__ = [
    "READING",
    "TOKEN_VARIABLE",
    "GuardLimits",
    "HtmlPage",
    "HttpGuard",
    "JsonServer",
    "RequestRejected",
    "choose_token",
    "format_url",
    "is_loopback",
    "listen",
    "parse_json_object",
    "request_key",
    "shown_token",
]

UNREADABLE = (HttpProcessingError, web.RequestPayloadError)
"""The errors of a request that is no HTTP."""
TOKEN_VARIABLE = "AGENTGYM_TOKEN"
"""The environment variable whose value every server demands as its token."""
_log = logging.getLogger(__name__)
_log.addFilter(lambda record: not isinstance((record.exc_info or (None, None))[1], UNREADABLE))
READING: Mapping[str, Any] = {"logger": _log, "auto_decompress": False, "lingering_time": 1.0}
"""The options of aiohttp by which a server leaves bodies compressed, logs no request that cannot be read, and reads the
rest of a refused body for a second at most."""
OPEN_PATHS = ("/health",)
"""Paths that need no token: a health monitor has none."""
SWEEP_S = 1.0
LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class RequestRejected(AgentGymError, ValueError):
    """A request that a server does not take; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (RequestRejected, (self.status, self.code, str(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardLimits:
    """The time that a client may take to send a request."""

    headers_s: float = 10.0
    """The seconds from the connection to the end of the first request's headers."""
    body_s: float = 60.0
    """The seconds from the end of the headers to the end of the body."""
    idle_s: float = 30.0
    """The seconds from an answer to the end of the next request's headers on the same connection, and those in which a
    client may read nothing of an answer."""


class HttpGuard:
    """Decides which requests a server takes, before any of its handlers sees them.

    - The `Host` header is an IP address, `localhost`, this machine's name, the name that the server listens on, or one
      of `allowed_hosts`. A web page that has its own name resolve to this machine (DNS rebinding) is refused.
    - `Origin`, which browsers send, is the server's own. This holds for WebSockets too.
    - A body is `application/json`, and not compressed: a small one could take all memory.
    - With a `token`, a request has it as `Authorization: Bearer TOKEN`, as the password of `Authorization: Basic`, or
      as `x-api-key`. `accepts_key` may accept other keys (an episode's own). A GET of `page_path` may have it as
      `?token=TOKEN`: what opens a page in a browser sets no header.
    - A request that is not sent completely ends after `limits`.
    """

    def __init__(
        self,
        host: str,
        *,
        token: str | None = None,
        allowed_hosts: Collection[str] = (),
        accepts_key: Callable[[str], bool] | None = None,
        page_path: str | None = None,
        limits: GuardLimits | None = None,
    ) -> None:
        self.token = token
        self._page_path = page_path
        self._allowed = {"localhost", socket.gethostname().lower(), host.lower(), *map(str.lower, allowed_hosts)} - {""}
        self._accepts_key = accepts_key
        self.limits = limits or GuardLimits()
        self._senders: set[object] = set()
        self._stalls: dict[object, tuple[int, float]] = {}
        """The connections on which nothing moves: the bytes that wait to be read, -1 before a request, and since when.
        """

    def check(self, request: web.BaseRequest) -> None:
        """Raises RequestRejected for a request with a foreign host, a foreign origin, no token or another body."""
        self._check_host(request.headers.get("Host", ""))
        self._check_origin(request)
        is_open = request.method == "GET" and request.path in OPEN_PATHS
        if self.token is not None and not is_open and not self._is_known(self._key_of(request)):
            how = "send the token that the server printed at its start as `Authorization: Bearer TOKEN` (the API key)"
            raise RequestRejected(401, "invalid_api_key", f"a token is needed: {how}")
        if (request.can_read_body or "Content-Type" in request.headers) and not _is_json(request.content_type):
            kind = request.content_type
            how = "send JSON with the header `Content-Type: application/json`"
            raise RequestRejected(415, "unsupported_media_type", f"a body of the type {kind!r:.80} is refused: {how}")
        if (coding := ", ".join(request.headers.getall("Content-Encoding", ["identity"]))) != "identity":
            how = "send it without the header `Content-Encoding`"
            raise RequestRejected(
                415, "unsupported_media_type", f"a body compressed by {coding!r:.80} is refused: {how}"
            )

    async def admit(self, request: web.BaseRequest) -> None:
        """Checks the request and reads its body for the handler; raises RequestRejected."""
        self._senders.add(request.protocol)
        self.check(request)
        if not request.can_read_body:
            return
        try:
            async with asyncio.timeout(self.limits.body_s):
                await request.read()
        except TimeoutError:
            seconds = f"{self.limits.body_s:g} s"
            raise RequestRejected(408, "request_timeout", f"the body did not arrive within {seconds}") from None
        except UNREADABLE as error:
            raise RequestRejected(400, "invalid_body", f"the body cannot be read: {error}") from error

    def middleware(self, answer: Callable[[RequestRejected], web.StreamResponse]) -> Middleware:
        """Returns the guard as aiohttp middleware; `answer` puts a refusal into the server's own form."""

        @web.middleware
        async def admit_request(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                await self.admit(request)
                return await handler(request)
            except RequestRejected as refusal:
                return answer(refusal)

        return admit_request

    def runner(
        self, app: web.Application, *, handler_cancellation: bool = True, shutdown_timeout: float = 1.0
    ) -> web.AppRunner:
        """Returns a runner that cancels the handler of a client that leaves, and closes idle connections in time."""
        return web.AppRunner(
            app,
            access_log=None,
            **READING,
            handler_cancellation=handler_cancellation,
            shutdown_timeout=shutdown_timeout,
            keepalive_timeout=self.limits.idle_s,
        )

    def watch(self, runner: web.BaseRunner) -> None:
        """Closes connections whose first request is not sent, or whose answer is not read, in time.

        It goes on until the runner is cleaned up.
        """
        if runner.server is None:
            return
        now, before = time.monotonic(), self._stalls
        transports = {each: each.transport for each in runner.server.connections if each.transport is not None}
        self._senders &= transports.keys()
        self._stalls = {}
        for connection, transport in transports.items():
            waiting = transport.get_write_buffer_size() if connection in self._senders else -1
            if waiting:
                waiting_before, since = before.get(connection, (0, now))
                self._stalls[connection] = (waiting, since if waiting == waiting_before else now)
                if now - self._stalls[connection][1] > (self.limits.headers_s if waiting < 0 else self.limits.idle_s):
                    transport.abort()
        asyncio.get_running_loop().call_later(min(SWEEP_S, self.limits.headers_s), self.watch, runner)

    def _check_host(self, header: str) -> None:
        name = _host_name(header)
        if name is None or not (name in self._allowed or name.endswith(".localhost") or _is_address(name)):
            hosts = ", ".join(sorted(self._allowed))
            message = f"the host {header!r:.80} is not served: use an IP address or one of {hosts}, or allow the name"
            raise RequestRejected(403, "host_not_allowed", f"{message} when the server is started (--allowed-hosts)")

    def _check_origin(self, request: web.BaseRequest) -> None:
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
        own = request.headers.get("Host", "").lower()
        is_own = origin is None or (origin.lower().partition("://")[2] == own and own != "")
        if not is_own or site not in ("none", "same-origin"):
            message = f"a request of a web page elsewhere ({origin or site!r:.80}) is refused"
            raise RequestRejected(403, "origin_not_allowed", message)

    def _key_of(self, request: web.BaseRequest) -> str:
        is_page = request.method == "GET" and request.path == self._page_path
        return request_key(request) or (request.query.get("token", "") if is_page else "")

    def _is_known(self, key: str) -> bool:
        assert self.token is not None
        is_token = hmac.compare_digest(key.encode(errors="surrogateescape"), self.token.encode())
        return is_token or (self._accepts_key is not None and bool(key) and self._accepts_key(key))


def choose_token(host: str, *, is_required: bool = False) -> str | None:
    """Returns the token that a server at `host` demands: that of AGENTGYM_TOKEN, else a new one, or None on loopback.

    With `is_required`, loopback has one too. Raises ConfigError for a value that no header can carry.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token:
        if len(token) < 16 or not (token.isascii() and token.isprintable()) or " " in token:
            rule = "at least 16 printable ASCII characters without spaces"
            raise ConfigError(f"{TOKEN_VARIABLE} holds no token: {rule} were wanted, such as `openssl rand -hex 16`")
        return token
    return secrets.token_urlsafe(24) if is_required or not is_loopback(host) else None


def shown_token(token: str) -> str:
    """Returns what a server prints as its token: a new one, or `$AGENTGYM_TOKEN`, as logs keep what is printed."""
    return f"${TOKEN_VARIABLE}" if token == os.environ.get(TOKEN_VARIABLE, "").strip() else token


@dataclass(frozen=True, slots=True)
class HtmlPage:
    """A page that an endpoint answers with, and its content security policy."""

    text: str
    policy: str

    def response(self, status: int) -> web.Response:
        """Returns the answer, which no other page may frame and no cache keeps."""
        headers = {
            "Content-Security-Policy": self.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return web.Response(text=self.text, status=status, content_type="text/html", headers=headers)


class JsonServer:
    """Answers requests with a status and JSON by their method and path; an asynchronous context manager.

    An endpoint gets the body, and may raise RequestRejected; a refusal is answered as `{"error": {"message": ...}}`, or
    by the page `login` if its token is missing or wrong. An endpoint may also answer with an HtmlPage.
    """

    def __init__(
        self,
        endpoints: Mapping[tuple[str, str], Callable[[bytes], Awaitable[tuple[int, object]]]],
        guard: HttpGuard,
        host: str,
        port: int,
        *,
        max_body: int,
        login: HtmlPage | None = None,
    ) -> None:
        self.url = ""
        """The URL `http://host:port`, once the server listens."""
        self._guard, self._host, self._port = guard, host, port

        def refuse(refusal: RequestRejected) -> web.StreamResponse:
            return _refusal(refusal) if login is None or refusal.status != 401 else login.response(401)

        app = web.Application(client_max_size=max_body, middlewares=[guard.middleware(refuse)])
        for (method, path), endpoint in endpoints.items():
            app.router.add_route(method, path, _handler(endpoint))
        self._runner = guard.runner(app)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        self.url = await listen(self._runner, self._guard, self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


def _handler(endpoint: Callable[[bytes], Awaitable[tuple[int, object]]]) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        status, content = await endpoint(await request.read())
        return content.response(status) if isinstance(content, HtmlPage) else web.json_response(content, status=status)

    return answer


def _refusal(refusal: RequestRejected) -> web.StreamResponse:
    return web.json_response({"error": {"message": str(refusal)}}, status=refusal.status)


async def listen(runner: web.BaseRunner, guard: HttpGuard, host: str, port: int, *, backlog: int = 1024) -> str:
    """Listens with the guard and returns the URL; a port of 0 takes a free one. The runner has been set up.

    Clients beyond `backlog` that connect at the same moment wait for seconds: the kernel drops what they send.
    Raises ConfigError, with the runner cleaned up, if the address is not available.
    """
    site = web.TCPSite(runner, host, port, backlog=backlog)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; give another --port, or 0 for any that is free"
        ) from error
    guard.watch(runner)
    return format_url(*runner.addresses[0][:2])


def format_url(host: str, port: int) -> str:
    """Returns the URL of a host and a port, with the brackets of an IPv6 address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body, empty without a body; raises RequestRejected (400) for anything else."""
    try:
        value = json.loads(raw, parse_constant=no_constant, parse_float=read_finite) if raw.strip() else {}
        if LONE_SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except NOT_JSON as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestRejected(400, "invalid_json", f"the body is not JSON: {reason:.200}") from error
    if not isinstance(value, dict):
        raise RequestRejected(400, "invalid_json", f"the body is a JSON object, got {type(value).__name__}")
    if is_too_deep(value, raw.count(b"[") + raw.count(b"{")):
        raise RequestRejected(400, "invalid_json", f"the body is nested more than {MAX_JSON_DEPTH} levels deep")
    return value


def request_key(request: web.BaseRequest) -> str:
    """Returns the token or key of the header `Authorization`, else of `x-api-key`."""
    scheme, _, rest = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return rest.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def _host_name(header: str) -> str | None:
    """Returns the name or address in a Host header, in lower case, without its port; None if there is none."""
    if not header or any(mark in header for mark in "@/?#\\ "):
        return None
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname.rstrip(".") if parts.hostname else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or (content_type.startswith("application/") and "+json" in content_type)
