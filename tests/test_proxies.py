"""Requests to other machines take the environment's proxy, and those to this machine never do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

import pytest

from agentgym.engines.openai import ChatEndpoint, ChatEndpointConfig
from agentgym.engines.servers.http import HttpClient
from agentgym.envs.adapters.openenv import OpenEnv
from agentgym.errors import AgentGymError, ConfigError
from agentgym.proxies import proxy_for
from agentgym.rewards.remote import RemoteConfig, RemoteReward
from agentgym.tools.mcp import McpServer, McpTools
from agentgym.tools.openapi.operation import Wire
from agentgym.tools.openapi.service import Service
from agentgym.tools.sandbox import open_sandbox, service

VARIABLES = [f"{name}_proxy" for name in ("http", "https", "no", "all")]
SCHEMA = {"action": {"properties": {"message": {"type": "string"}}}}


class Proxy(ThreadingHTTPServer):
    """Answers every request itself; `requests` has the method and the address of each."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.headers: list[Any] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def answer(self) -> None:
        self.server.requests.append((self.command, self.path))
        self.server.headers.append(self.headers)
        content = json.dumps(SCHEMA if self.path.endswith("/schema") else {"data": [{"id": "m"}]}).encode()
        self.send_response(200 if self.command == "GET" else 403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_CONNECT = answer


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy for http and https, which the environment names."""
    with Proxy() as server:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv("HTTP_PROXY", server.url)
        monkeypatch.setenv("https_proxy", server.url.removeprefix("http://"))  # as many people write it
        yield server
        server.shutdown()


def ask_endpoint(url: str) -> None:
    async def ask() -> None:
        async with ChatEndpoint(url, ChatEndpointConfig(max_retries=0)) as endpoint:
            await endpoint.open()

    asyncio.run(ask())


def ask_reward_server(url: str) -> None:
    async def ask() -> None:
        reward = RemoteReward(RemoteConfig(url=url), {}, 1)
        try:
            await reward._http.get(url)
        finally:
            await reward.close()

    asyncio.run(ask())


def call_operation(url: str) -> None:
    asyncio.run(Service(url, {}, {}).answer("look", Wire(method="GET", path="/look", query=(), headers={})))


def play_openenv(url: str) -> None:
    env = OpenEnv(url=url, reply_timeout_s=5.0)
    try:
        env.reset(seed=1)
    finally:
        env.close()


def list_mcp_tools(url: str) -> None:
    source = McpTools(McpServer(url=url, start_timeout_s=10.0))
    try:
        source.open()
    finally:
        source.close()


def run_program(url: str) -> None:
    with patch.object(service, "PAUSES_S", ()), open_sandbox(url) as sandbox:
        sandbox.run("print(1)")


ASKERS = [ask_endpoint, ask_reward_server, call_operation, play_openenv, list_mcp_tools, run_program]


@pytest.mark.parametrize("ask", ASKERS)
def test_every_client_of_other_machines_takes_the_proxy(ask: Callable[[str], None], proxy: Proxy) -> None:
    with contextlib.suppress(AgentGymError):
        ask("http://model.corp.invalid")
    assert proxy.requests and {path.partition("invalid")[0] for _, path in proxy.requests} == {"http://model.corp."}
    if ask is play_openenv:
        assert [path.rpartition("/")[2] for _, path in proxy.requests] == ["schema", "ws"]
    proxy.requests.clear()
    with contextlib.suppress(AgentGymError):
        ask("https://model.corp.invalid")
    assert proxy.requests[0] == ("CONNECT", "model.corp.invalid:443")


@pytest.mark.parametrize("ask", ASKERS)
def test_this_machine_and_the_hosts_of_no_proxy_are_reached_directly(
    ask: Callable[[str], None], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", ".corp.invalid")
    for url in ("http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9", "http://model.corp.invalid"):
        with pytest.raises(AgentGymError):
            ask(url)
    assert proxy.requests == []


def test_the_servers_of_engines_are_reached_directly(proxy: Proxy) -> None:
    async def ask() -> None:
        client = HttpClient("http://node7.corp.invalid:30000")
        try:
            await client.get("/health")
        finally:
            await client.close()

    with pytest.raises(AgentGymError):
        asyncio.run(ask())
    assert proxy.requests == []


def test_a_proxy_gets_its_own_password_and_no_error_shows_it(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//user:hush@"))
    monkeypatch.setenv("https_proxy", proxy.url.replace("//", "//user:hush@"))
    ask_endpoint("http://model.corp.invalid")
    with pytest.raises(AgentGymError) as caught:
        ask_endpoint("https://model.corp.invalid")
    assert [headers["Proxy-Authorization"] for headers in proxy.headers] == ["Basic dXNlcjpodXNo"] * 2
    assert "403" in str(caught.value) and "hush" not in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize(
    ("exceptions", "direct", "by_proxy"),
    [
        ("*", "http://a.b", None),
        ("corp.com", "https://x.corp.com/v1 http://corp.com. http://CORP.com", "http://acorp.com http://corp.com.de"),
        (".corp.com", "http://x.corp.com http://corp.com", "http://acorp.com"),
        ("*.corp.com other", "http://x.corp.com http://other", "http://x.com"),
        ("a:81", "http://a:81", "http://a http://a:82"),
        ("10.0.0.1:81,a", "http://10.0.0.1:81 wss://a ws://b.a:8", "http://10.0.0.1:80"),
        ("10.0.0.0/8, 192.168.1.7", "http://10.2.3.4:8000/v1 http://192.168.1.7", "http://11.2.3.4 http://192.168.1.8"),
        ("[2001:db8::1]:80,fd00::/8", "http://[2001:db8::1]:80 http://[fd00::3]", "http://[2001:db8::1]:81"),
        ("", "http://127.0.0.1 http://127.9.9.9 http://0.0.0.0:8 http://m.localhost ws://[::1]", "http://10.0.0.1"),
    ],
)
def test_no_proxy_lists_domains_addresses_networks_and_ports(
    exceptions: str, direct: str, by_proxy: str | None, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", exceptions)
    assert [proxy_for(url) for url in direct.split()] == [None] * len(direct.split())
    assert all(proxy_for(url) == proxy.url for url in (by_proxy or "").split())


@pytest.mark.parametrize("address", ["socks5://127.0.0.1:1080", "http://user:hush@", "http://u:hush@host:port", "//"])
def test_what_is_no_proxy_for_http_is_refused_in_one_line_without_its_password(
    address: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", address)
    with pytest.raises(ConfigError, match=r"HTTPS_PROXY is not the address .*NO_PROXY=api\.example\.com") as caught:
        ChatEndpoint("https://api.example.com/v1", ChatEndpointConfig(model="m"))
    assert "hush" not in str(caught.value)
    assert proxy_for("https://127.0.0.1:8000") is None
