"""JSON over HTTP for engines that are servers: one connection pool, and errors that name the server and the failure."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentgym.engines.servers.retry_after import retry_after_s
from agentgym.errors import NOT_JSON, ConfigError, EngineError
from agentgym.proxies import proxy_options
from agentgym.refusals import Secrets, refusal_status
from agentgym.url_credentials import refuse_credentials

if TYPE_CHECKING:  # loaded by the first request: settings of servers are read without it
    import aiohttp

__all__ = [
    "DONE",
    "MALFORMED",
    "SERVER_SECRET",
    "HttpClient",
    "HttpRefusal",
    "HttpUnreachable",
    "check_addresses",
    "check_token",
    "connection_slots",
    "secret_headers",
    "server_address",
]

_LARGE = 1 << 20
_KEPT_S = 3.0
"""Seconds that an unused connection is kept; shorter than in a server (uvicorn: 5), or a request could meet its
closing."""
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""The errors of reading an answer that has another form."""
MAX_SHOWN = 500
"""The number of characters of a server's own message in our errors."""
DONE = "[DONE]"
"""The last event of a stream that is whole."""
_SAYS_WHEN = (429, 503, 529)
"""The statuses of a busy server, which may say in its answer how long to wait."""


class HttpUnreachable(EngineError):
    """No answer: the server is down, dropped the connection, or took too long.

    It is unknown whether the server began the work.
    """


class HttpRefusal(EngineError):
    """The server answered with an error; `body` is its whole answer, of which the message has the beginning."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = body or message

    def __reduce__(self) -> tuple[object, ...]:
        return (HttpRefusal, (str(self), self.status, self.retry_after_s, self.body))


SERVER_SECRET = "AGENTGYM_SERVER_SECRET"
"""The environment variable with the secret of a running server; a server that we launch gets its own secret in it."""


def secret_headers(secret: str) -> dict[str, str]:
    """Returns the headers of a request to a server with that secret; empty if there is no secret."""
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def check_token(error: Exception, name: str) -> None:
    """Raises EngineError that names the place for the token if the server `name` refused ours, or the lack of one."""
    if isinstance(error, HttpRefusal) and error.status in (401, 403):
        raise EngineError(f"{name} wants a token (its --api-key) in the variable {SERVER_SECRET}: {error}") from error


def server_address(url: str) -> str:
    """Returns `http://host:30000` for it with a slash at its end, or with the `/v1` of chat completions."""
    return url.rstrip("/").removesuffix("/v1")


def check_addresses(urls: Sequence[str], server: str) -> None:
    """Raises ConfigError for what is not the address of an HTTP server, and for a server that is given twice."""
    refuse_credentials(urls, server)
    addresses = [server_address(url) for url in urls]
    for url, address in zip(urls, addresses, strict=True):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the URL of {server} begins with http://, got {url!r}")
        if addresses.count(address) > 1:
            raise ConfigError(f"{url!r} is given twice: one server is one replica")


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def connection_slots() -> asyncio.Semaphore:
    """Returns the semaphore to hold during a request that waits for a model; all clients of the running loop share it.

    It has a third as many slots as this process may open further files: connections are kept for a while after a
    request, and environments and tools need files as well.
    """
    loop = asyncio.get_running_loop()
    if loop not in _slots:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_free = (1 << 20 if limit == resource.RLIM_INFINITY else limit) - len(os.listdir("/dev/fd"))
        _slots[loop] = asyncio.Semaphore(max(1, num_free // 3))
    return _slots[loop]


class HttpClient:
    """Requests to one or several servers over one pool of kept connections; made and closed on one event loop.

    `base_url` is put before every path that begins with a slash. With `use_proxy` the environment's proxy for it is
    used (`proxy_options`); servers of engines are reached directly. The number of connections is not bounded: the
    rollout bounds its episodes, and clients of endpoints hold one of the `connection_slots`.
    """

    def __init__(
        self,
        base_url: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        use_proxy: bool = False,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self.secrets = Secrets(self._headers, {})
        """The values of the headers, which are masked in a server's refusals."""
        self._timeout_s = timeout_s
        self._proxy = proxy_options(base_url) if use_proxy else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Returns the JSON answer of `path`; None for an empty answer."""
        return await self._request("GET", path, None, timeout_s)

    async def post(self, path: str, payload: Mapping[str, object] | bytes, *, timeout_s: float | None = None) -> Any:
        """Returns the JSON answer of `path` to `payload`; None for an empty answer, text if it is not JSON.

        A payload of bytes is JSON already.

        Raises HttpRefusal for an answer that is an error, HttpUnreachable for no answer.
        """
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return await self._request("POST", path, body, timeout_s)

    async def stream(
        self, path: str, payload: Mapping[str, object], *, timeout_s: float | None = None, with_done: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Yields the JSON of each server-sent event in the answer of `path` to `payload`, up to `[DONE]` or the end.

        `timeout_s` is for the whole stream. With `with_done` a `[DONE]` is yielded too, as DONE. Raises HttpRefusal and
        HttpUnreachable, the latter also in mid-stream.
        """
        url = self._url(path)
        with _connection_errors(url, timeout_s or self._timeout_s):
            async with (
                asyncio.timeout(timeout_s if timeout_s is not None else self._timeout_s),
                self._open_session().post(url, data=_body(json.dumps(payload).encode()), **self._proxy) as response,
            ):
                if response.status >= 400:
                    raise _refusal(url, response, await response.read(), self.secrets)
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == DONE.encode():
                        if with_done:
                            yield DONE
                        return
                    if data:
                        yield _read(data)

    async def close(self) -> None:
        """Closes the connections; a second call does nothing."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> Any:
        url = self._url(path)
        with _connection_errors(url, timeout_s or self._timeout_s):
            async with (
                asyncio.timeout(timeout_s if timeout_s is not None else self._timeout_s),
                self._open_session().request(method, url, data=_body(body), **self._proxy) as response,
            ):
                content = await response.read()
        if response.status >= 400:
            raise _refusal(url, response, content, self.secrets)
        return _read(content)

    def _url(self, path: str) -> str:
        return f"{self.base_url}{path}" if path.startswith("/") else path

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),  # model servers set no cookies; looking for them costs time
                headers={"Content-Type": "application/json", **self._headers},
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                read_bufsize=1 << 24,  # half of the longest line of a stream: SGLang repeats a reply in each
            )
        return self._session


@contextmanager
def _connection_errors(url: str, timeout_s: float | None) -> Iterator[None]:
    """Raises HttpUnreachable for a connection that broke: there is no answer, and it is unknown what was started."""
    try:
        yield
    except TimeoutError as error:
        raise HttpUnreachable(f"{url} gave no answer within {timeout_s or 0:g} s") from error
    except _connection_faults() as error:
        raise HttpUnreachable(f"{url} cannot be reached: {type(error).__name__}: {error!s:.300}") from error


def _connection_faults() -> tuple[type[Exception], ...]:
    from aiohttp import ClientError
    from aiohttp.http_exceptions import HttpProcessingError  # for a line that is too long

    return ClientError, OSError, HttpProcessingError


def _refusal(url: str, response: aiohttp.ClientResponse, content: bytes, secrets: Secrets) -> HttpRefusal:
    body = secrets.mask_secrets(content[: 1 << 16].decode(errors="replace"))
    status = refusal_status(response.status, response.headers)
    words = " ".join(body[:MAX_SHOWN].split())
    if words.lower().startswith(("<!doctype html", "<html")):
        words = "a page of HTML"
    wait_s = retry_after_s(response.headers, body if status in _SAYS_WHEN else "")
    return HttpRefusal(f"{url} answered {response.status}: {words}", status, wait_s, body)


def _body(data: bytes | None) -> bytes | io.BytesIO | None:
    """Returns a large body as a file, which aiohttp sends in pieces instead of blocking the event loop."""
    return data if data is None or len(data) < _LARGE else io.BytesIO(data)


def _read(body: bytes) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except NOT_JSON:
        return body.decode(errors="replace")
