"""Who may ask our HTTP servers, in which form, and how slowly: the same for every server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentgym import http_guard
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.embedded import embedded_folder
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.adapters.openenv_server import openenv_app, serve_openenv
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import ConfigError
from agentgym.http_guard import (
    GuardLimits,
    HttpGuard,
    RequestRejected,
    choose_token,
    format_url,
    listen,
    parse_json_object,
)
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rewards.server import RewardServer
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.testing.fake_server.server import FakeConfig, FakeServer
from agentgym.tools.sandbox import SandboxLimits, open_sandbox
from agentgym.tools.sandbox.service_server import SandboxServer

TOKEN = "a-token-of-some-length"
POSTS = {"serve": "/v1/chat/completions", "env serve": "/reset", "reward-server": "/", "fake-server": "/generate"}
POSTS["sandbox serve"] = "/run_code"
DOORS = tuple(POSTS)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(embedded_folder())


@asynccontextmanager
async def episodes(renderer: Renderer, token: str | None) -> AsyncIterator[str]:
    loop = ServedLoop(RolloutLoop(ScriptedEngine(lambda *_: [2]), renderer))
    async with EpisodeServer(loop, ServeConfig(port=0, quiet_s=0.0, claim_s=0.05, token=token)) as server:
        yield server.url


@asynccontextmanager
async def openenv(token: str | None) -> AsyncIterator[str]:
    urls: asyncio.Queue[str] = asyncio.Queue()
    guard = HttpGuard("127.0.0.1", token=token)
    app = openenv_app("GuessNumber-v0", resolve_env("GuessNumber-v0", {}), guard=guard)
    serving = asyncio.create_task(serve_openenv(app, "127.0.0.1", 0, urls.put_nowait))
    try:
        yield await asyncio.wait_for(urls.get(), 30)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def reward(token: str | None) -> AsyncIterator[str]:
    config = RewardConfig(function="exact_match")
    async with open_rewards(config) as rewards, RewardServer(rewards, token=token) as server:
        yield server.url


@asynccontextmanager
async def fake(token: str | None) -> AsyncIterator[str]:
    server = FakeServer(FakeConfig(token=token))
    try:
        yield await server.host.start()
    finally:
        await server.host.close()


@asynccontextmanager
async def sandbox(token: str | None) -> AsyncIterator[str]:
    guard, limits = HttpGuard("127.0.0.1", token=token), SandboxLimits()
    with open_sandbox(limits=limits) as box:
        async with SandboxServer(box, limits, concurrency=2, guard=guard) as server:
            yield server.url


def door(name: str, renderer: Renderer, token: str | None = None) -> AbstractAsyncContextManager[str]:
    if name == "serve":
        return episodes(renderer, token)
    if name == "reward-server":
        return reward(token)
    if name == "sandbox serve":
        return sandbox(token)
    return openenv(token) if name == "env serve" else fake(token)


def asking(
    renderer: Renderer, name: str, ask: Callable[[aiohttp.ClientSession, str], Awaitable[Any]], token: str | None = None
) -> Any:
    """What `ask` returns, with a session and the URL of the door."""

    async def run() -> Any:
        async with door(name, renderer, token) as url, aiohttp.ClientSession() as session:
            return await ask(session, url)

    return asyncio.run(run())


def statuses(
    renderer: Renderer, name: str, *requests: dict[str, Any], path: str = "", token: str | None = None
) -> list[int]:
    """The status of the answer to a POST with each of these arguments."""

    async def ask(session: aiohttp.ClientSession, url: str) -> list[int]:
        codes = []
        for request in requests:
            async with session.post(url + (path or POSTS[name]), **request) as answer:
                assert answer.content_type == "application/json", await answer.text()
                assert await answer.json(), "a refusal says why"
                codes.append(answer.status)
        return codes

    return list(asking(renderer, name, ask, token))


@pytest.mark.parametrize("name", DOORS)
def test_a_foreign_host_or_origin_and_a_body_that_is_not_json_are_refused(renderer: Renderer, name: str) -> None:
    evil = {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": "text/plain"}
    headers = [
        evil,
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": "user@127.0.0.1"},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ]
    requests = [
        {"data": b"{}", "headers": {"Content-Type": "application/json", **origin_headers}} for origin_headers in headers
    ]
    assert statuses(renderer, name, *requests) == [403] * len(headers)
    forms = [{"data": b"{}", "headers": {"Content-Type": kind}} for kind in ("text/plain", "multipart/form-data")]
    assert statuses(renderer, name, *forms, {"data": {"a": "b"}}) == [415] * 3


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{"text": "\\ud800", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"\xff\xfe{",
        b'{"torn": ',
        b"[]",
        b"1" * 10_000,
    ],
    ids=["deep", "objects", "surrogate", "not-utf8", "torn", "list", "long-number"],
)
def test_broken_json_is_the_clients_error(renderer: Renderer, name: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    requests = [{"data": body, "headers": headers}, {"data": body, "headers": {**headers, "Content-Encoding": "gzip"}}]
    path = "/episodes/none/step" if name == "serve" else ""
    assert all(400 <= status < 500 for status in statuses(renderer, name, *requests, path=path))


@pytest.mark.parametrize("name", DOORS)
def test_a_token_is_demanded_where_there_is_one(renderer: Renderer, name: str) -> None:
    basic = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
    wrong: list[dict[str, Any]] = [
        {"json": {}},
        *({"json": {}, "headers": {"Authorization": value}} for value in ("Bearer x", "Basic =", "Bearer", "Bearer é")),
    ]
    right = [{"json": {}, "headers": {"Authorization": value}} for value in (f"Bearer {TOKEN}", f"Basic {basic}")]
    assert statuses(renderer, name, *wrong, token=TOKEN) == [401] * len(wrong)
    assert 401 not in statuses(renderer, name, *right, token=TOKEN)

    async def health(session: aiohttp.ClientSession, url: str) -> int:
        async with session.get(f"{url}/health") as answer:
            return answer.status

    assert asking(renderer, name, health, TOKEN) == 200


def test_a_websocket_of_another_page_is_refused_before_it_opens(renderer: Renderer) -> None:
    async def ask(session: aiohttp.ClientSession, url: str) -> list[int]:
        codes = []
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(f"{url}/ws", headers=headers)
            codes.append(refused.value.status)
        for own in ({}, {"Origin": url}):
            async with session.ws_connect(f"{url}/ws", headers=own) as socket:
                await socket.send_json({"type": "reset", "data": {}})
                assert (await socket.receive_json())["type"] == "observation"
        return codes

    assert asking(renderer, "env serve", ask) == [403, 403]


def test_a_name_that_is_allowed_is_served() -> None:
    async def run() -> list[int]:
        guard = HttpGuard("127.0.0.1", allowed_hosts=["Gym.example"])
        codes = []
        async with answering(guard) as url, aiohttp.ClientSession() as session:
            for host in ("gym.example:8000", "localhost:1", "a.localhost", "10.1.2.3", "[::1]:80", "other.example"):
                async with session.get(url, headers={"Host": host}) as answer:
                    codes.append(answer.status)
        return codes

    assert asyncio.run(run()) == [200] * 5 + [403]


@asynccontextmanager
async def answering(guard: HttpGuard) -> AsyncIterator[str]:
    """A server that answers everything that its guard admits."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=f"{len(await request.read())}")

    app = web.Application(
        middlewares=[guard.middleware(lambda refusal: web.Response(status=refusal.status, text=str(refusal)))]
    )
    app.router.add_route("*", "/", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        yield await listen(runner, guard, "127.0.0.1", 0)
    finally:
        await runner.cleanup()


def test_requests_that_are_half_sent_end_in_time_and_nobody_waits_for_them() -> None:
    halves = (b"", b"POST / HTTP/1.1\r\nHost: localhost\r\n", b"GET")
    body = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"

    async def half(host: str, port: int, content: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(content)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer

    async def run() -> tuple[set[bytes], set[bytes], int]:
        guard = HttpGuard("127.0.0.1", limits=GuardLimits(headers_s=0.3, body_s=0.3))
        async with answering(guard) as url:
            port = int(url.rpartition(":")[2])
            torn = [asyncio.ensure_future(half("127.0.0.1", port, halves[number % 3])) for number in range(150)]
            slow = [asyncio.ensure_future(half("127.0.0.1", port, body)) for _ in range(150)]
            await asyncio.sleep(0.05)
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                status = answer.status
            return set(await asyncio.gather(*torn)), set(await asyncio.gather(*slow)), status

    torn, slow, status = asyncio.run(run())
    assert status == 200
    assert torn == {b""}, "the connection closes without an answer"
    assert all(b"408" in line for line in slow)


@pytest.mark.parametrize("name", DOORS)
def test_a_connection_that_idles_or_half_sends_its_next_request_is_closed(
    renderer: Renderer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "GuardLimits", lambda: GuardLimits(idle_s=0.2))

    async def ask(_: aiohttp.ClientSession, url: str) -> list[bytes]:
        port = int(url.rpartition(":")[2])

        async def rest_of_connection(sent_after: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if b"content-length" in line)
            await reader.readexactly(length)
            writer.write(sent_after)
            rest = b""
            with contextlib.suppress(ConnectionError):  # what was sent after the end
                rest = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            return rest

        return list(await asyncio.gather(*map(rest_of_connection, (b"", b"GET /hea", b"POST / HTTP/1.1\r\nHost: a"))))

    assert asking(renderer, name, ask) == [b""] * 3


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("kind", ["Content-Length: 900000000", "Transfer-Encoding: chunked"])
def test_a_body_that_never_ends_is_not_read_long_after_its_refusal(
    renderer: Renderer, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "GuardLimits", lambda: GuardLimits(body_s=0.2))
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST {POSTS[name]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{kind}\r\n\r\n"

    async def ask(_: aiohttp.ClientSession, url: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(health + head.encode())
        received = bytearray()

        async def receive() -> None:
            with contextlib.suppress(ConnectionError):  # what was sent after the end
                while part := await reader.read(4096):
                    received.extend(part)

        receiving = asyncio.ensure_future(receive())
        async with asyncio.timeout(8):
            while not receiving.done():
                writer.write(b"1\r\n \r\n")
                await asyncio.sleep(0.05)
        writer.close()
        return bytes(received)

    assert b" 408 " in asking(renderer, name, ask)


@pytest.mark.parametrize("name", DOORS)
def test_a_client_that_reads_no_answers_is_left(renderer: Renderer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "GuardLimits", lambda: GuardLimits(headers_s=0.2, idle_s=0.5))

    async def ask(_: aiohttp.ClientSession, url: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1)
        requests = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(requests)
                    await writer.drain()
        writer.close()
        assert not reader.at_eof(), "the answers were not read to the end"

    asking(renderer, name, ask)


@pytest.mark.parametrize("name", DOORS)
def test_a_compressed_body_is_refused_before_it_is_inflated(renderer: Renderer, name: str) -> None:
    small = [
        {"data": compress(b"{" + b" " * 10_000_000 + b"}"), "headers": {"Content-Encoding": coding}}
        for coding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress))
    ]
    requests = [{**request, "headers": {"Content-Type": "application/json", **request["headers"]}} for request in small]
    assert statuses(renderer, name, *requests) == [415, 415]


@pytest.mark.parametrize("name", DOORS)
def test_a_second_compression_header_counts_and_bad_requests_are_not_logged(
    renderer: Renderer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST {POSTS[name]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    body = gzip.compress(b"{" + b" " * 10_000 + b"}")
    requests = [
        head + f"Content-Encoding: {codings}\r\nContent-Length: {len(body)}\r\n\r\n"
        for codings in ("identity\r\nContent-Encoding: gzip", "br", "deflate")
    ]
    requests += [head + "X: " + "a" * 10_000, head + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n"]

    async def ask(session: aiohttp.ClientSession, url: str) -> list[bytes]:
        async def status(request: str) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))
            writer.write(request.encode() + body)
            line = await asyncio.wait_for(reader.readline(), 30)
            writer.close()
            return line.split()[1]

        return [await status(request) for request in requests]

    assert asking(renderer, name, ask) == [b"415", b"415", b"415", b"400", b"400"]
    assert not caplog.records


def test_an_address_that_other_machines_reach_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)
    assert [choose_token(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8")] == [None] * 4
    tokens = [choose_token(host) for host in ("0.0.0.0", "::", "", "10.0.0.1", "gym.example")]
    tokens.append(choose_token("127.0.0.1", is_required=True))
    assert all(token and len(token) >= 32 for token in tokens) and len(set(tokens)) == len(tokens)
    with pytest.raises(ConfigError, match="give it a token"):
        ServeConfig(host="0.0.0.0")
    monkeypatch.setenv("AGENTGYM_TOKEN", TOKEN)
    assert choose_token("127.0.0.1") == choose_token("0.0.0.0") == TOKEN
    monkeypatch.setenv("AGENTGYM_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        choose_token("127.0.0.1")


def test_json_is_read_to_a_bounded_depth() -> None:
    assert parse_json_object(b" ") == {}
    assert parse_json_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}
    wide = b'{"a": [' + b",".join([b"[1]"] * 200) + b"]}"
    assert len(parse_json_object(wide)["a"]) == 200
    assert parse_json_object(b'{"a":' * 100 + b"1" + b"}" * 100)
    with pytest.raises(RequestRejected, match="levels deep"):
        parse_json_object(b'{"a":' * 101 + b"1" + b"}" * 101)


def test_an_ipv6_address_has_brackets_in_a_url() -> None:
    assert (format_url("::1", 80), format_url("127.0.0.1", 80)) == ("http://[::1]:80", "http://127.0.0.1:80")
