"""The connection to a Docker daemon, with one that answers as slowly, and as much at once, as a test wants."""

from __future__ import annotations

import contextlib
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.errors import SandboxError
from agentgym.tools.containers import daemon as daemon_module
from agentgym.tools.containers.daemon import Container, Daemon
from agentgym.tools.containers.workspace import ContainerLimits, Workspace

UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
ANSWERS = {
    "version": b'{"ApiVersion": "1.43"}',
    "exec": b'{"Id": "e1"}',
    "create": b'{"Id": "c1"}',
    "json": b'{"ExitCode": null}',
}
attachment_ended = threading.Event()
connections: list[object] = []
"""One entry for each."""


def told(text: bytes) -> bytes:
    return struct.pack("!BxxxI", 1, len(text)) + text


class Handler(socketserver.StreamRequestHandler):
    """Answers until the connection is a stream: its first output comes in one piece with the answer's head."""

    def handle(self) -> None:
        connections.append(self.client_address)
        while line := self.rfile.readline():
            heads = dict(head.lower().split(b":", 1) for head in iter(self.rfile.readline, b"\r\n"))
            self.rfile.read(int(heads.get(b"content-length", 0)))
            method, path = line.decode().split()[:2]
            verb = path.partition("?")[0].rpartition("/")[2]
            if verb == "attach":
                self.request.sendall(UPGRADED)
                self.rfile.read()
                attachment_ended.set()
                return
            if "exec" in path and verb == "start":
                self.request.sendall(UPGRADED + told(b"first ") + told(b"second ") + told(b"third")[:10])
                time.sleep(0.1)
                self.request.sendall(told(b"third")[10:])
                return
            body, code = ANSWERS.get(verb, b""), 500 if method == "DELETE" else 200
            self.request.sendall(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (code, len(body), body))


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    path = tmp_path / "docker.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        with contextlib.closing(Daemon()) as client:
            yield client
        server.shutdown()
        thread.join()


def test_output_that_comes_with_the_head_of_the_answer_is_not_lost(daemon: Daemon) -> None:
    name, stream = Container(daemon._client, "c1").begin(["echo"], "1:1", "/")
    with contextlib.closing(stream):
        stream.settimeout(5.0)
        assert (name, b"".join(iter(lambda: stream.recv(100), b""))) == ("e1", b"first second third")


def test_a_container_loses_its_input_even_if_the_daemon_does_not_remove_it(daemon: Daemon) -> None:
    workspace = Workspace(daemon, "image", ContainerLimits(), "1:1")
    attachment_ended.clear()
    with pytest.raises(SandboxError, match="Docker: 500"):
        workspace.close()
    assert attachment_ended.wait(5.0)


def test_a_command_whose_exit_code_no_daemon_tells_is_the_containers_fault(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "END_S", 0.1)
    workspace = Workspace(daemon, "image", ContainerLimits(), "1:1")
    with pytest.raises(SandboxError, match="closed its output, and not ended"):
        workspace.run("true")
    with pytest.raises(SandboxError):
        workspace.close()


def test_requests_share_a_connection_whatever_they_ask_and_streams_have_their_own(daemon: Daemon) -> None:
    """The SDK's pool of each URL is closed when 25 later ones were asked, also under a request."""
    connections.clear()
    for number in range(40):
        assert daemon.has_image(f"image-{number}")
    assert connections == []  # the one that asked for the version is free
    for _ in range(2):
        Container(daemon._client, "c1").begin(["echo"], "1:1", "/")[1].close()
    assert len(connections) == 2
