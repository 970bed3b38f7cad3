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

from agentgym.tools.containers.daemon import Container, Daemon

UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
ANSWERS = {"version": b'{"ApiVersion": "1.43"}', "_ping": b"OK", "exec": b'{"Id": "e1"}'}


def told(text: bytes) -> bytes:
    return struct.pack("!BxxxI", 1, len(text)) + text


class Handler(socketserver.StreamRequestHandler):
    """Answers until the connection is a stream: its first output comes in one piece with the answer's head."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            heads = dict(head.lower().split(b":", 1) for head in iter(self.rfile.readline, b"\r\n"))
            self.rfile.read(int(heads.get(b"content-length", 0)))
            asked = line.split()[1].decode().rpartition("/")[2]
            if asked == "start":
                self.request.sendall(UPGRADED + told(b"first ") + told(b"second ") + told(b"third")[:10])
                time.sleep(0.1)
                self.request.sendall(told(b"third")[10:])
                return
            body = ANSWERS[asked]
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    path = tmp_path / "docker.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        with contextlib.closing(Daemon()) as one:
            yield one
        server.shutdown()
        thread.join()


def test_output_that_comes_with_the_head_of_the_answer_is_not_lost(daemon: Daemon) -> None:
    name, stream = Container(daemon._client, "c1").begin(["echo"], "1:1", "/")
    with contextlib.closing(stream):
        stream.settimeout(5.0)
        assert (name, b"".join(iter(lambda: stream.recv(100), b""))) == ("e1", b"first second third")
