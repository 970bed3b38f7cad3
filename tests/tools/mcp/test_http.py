"""MCP servers over streamable HTTP: a session for each episode, and servers that go away."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentgym.engines.servers.server_process import free_port
from agentgym.errors import EnvironmentFault
from agentgym.tools.mcp import McpServer

COUNTER = Path(__file__).parent / "servers" / "counter.py"


@pytest.fixture
def http_server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, COUNTER, "--http", str(port)], stderr=log, stdout=log)
    ends = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < ends, (tmp_path / "log").read_text()
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp", process
    process.kill()
    process.wait()


def test_an_episode_has_a_session_of_its_own_until_the_server_goes(
    http_server: tuple[str, subprocess.Popen[bytes]], desk: Callable[..., Any]
) -> None:
    url, process = http_server
    first, second = desk(url), desk(McpServer(url=url, call_timeout_s=20))
    assert [first.ask("add")[0] for _ in range(3)] == ["1", "2", "3"]
    assert second.ask("add", amount=7) == ("7", None)
    assert first.ask("pid") == second.ask("pid")
    first.close()
    assert second.ask("sums", numbers=[1, 2])[1] is None
    process.kill()
    process.wait()
    with pytest.raises(EnvironmentFault, match=f"{url}` ended during a call of 'add'|failed during a call of 'add'"):
        second.ask("add")


def test_a_server_that_is_not_there_cannot_be_reached(desk: Callable[..., Any]) -> None:
    with pytest.raises(EnvironmentFault, match="could not be reached"):
        desk(f"http://127.0.0.1:{free_port()}/mcp")


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers calls with a status and a text."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            results: dict[str, Any] = {
                "initialize": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "x", "version": "1"},
                },
                "tools/list": {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]},
                "ping": {},
            }
            status, text = request.param
            if message["method"] in results:
                status, text = (
                    200,
                    json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}),
                )
            self.send_response(202 if "id" not in message else status)
            self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/plain")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.replace("ID", str(message.get("id"))).ljust(len(text)).encode())

        def do_GET(self) -> None:
            self.send_error(405)

        do_DELETE = do_GET

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()


FAILED = '{"jsonrpc": "2.0", "id": ID, "error": {"code": -32603, "message": "no such town"}}'


@pytest.mark.long
@pytest.mark.parametrize(
    "answering", [(500, "oops"), (503, "<p>"), (429, '{"message": "slow down"}'), (401, ""), (403, "no")], indirect=True
)
def test_a_service_that_fails_or_refuses_us_is_an_infrastructure_failure(
    answering: str, desk: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    status = request.node.callspec.params["answering"][0]
    env = desk(McpServer(url=answering, call_timeout_s=20))
    with pytest.raises(EnvironmentFault, match=f"ended during a call of 'ask': it answered {status} "):
        env.ask("ask")


@pytest.mark.parametrize("answering", [(400, FAILED), (500, FAILED), (200, FAILED)], indirect=True)
def test_the_servers_error_of_a_call_reaches_the_model_at_any_status(answering: str, desk: Callable[..., Any]) -> None:
    assert desk(answering).ask("ask") == ("ask failed: no such town", "tool_error")


def says(text: str, **more: bool) -> tuple[int, str]:
    result = {"content": [{"type": "text", "text": text}], **more}
    return 200, json.dumps({"jsonrpc": "2.0", "id": "ID", "result": result}).replace('"ID"', "ID")


@pytest.mark.parametrize(
    "answering",
    [says("you sent hush-hush"), says("you sent hush-hush", isError=True), (200, FAILED.replace("town", "hush-hush"))],
    indirect=True,
)
def test_a_key_that_a_server_repeats_does_not_reach_the_model(answering: str, desk: Callable[..., Any]) -> None:
    content, _ = desk(McpServer(url=answering, headers={"Authorization": "Bearer hush-hush"})).ask("ask")
    assert "***" in content and "hush" not in content
