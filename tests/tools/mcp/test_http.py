"""MCP servers over streamable HTTP: a session for each episode, and servers that go away."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import EnvironmentFault
from agentgym.tools.mcp import McpServer

COUNTER = Path(__file__).parent / "servers" / "counter.py"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


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
