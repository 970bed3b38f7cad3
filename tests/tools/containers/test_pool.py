"""A pool of containers that is closed while one is starting, on a daemon that takes as long as a test wants."""

from __future__ import annotations

import itertools
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.errors import SandboxError
from agentgym.tools.containers.pool import ContainerPool, Kind
from agentgym.tools.containers.workspace import Workspace

WAIT_S = 60.0


class FakeDocker(socketserver.ThreadingUnixStreamServer):
    """Starts a container when it may, and knows which containers and images are left."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.num_made = 0
        self.left: set[str] = set()
        self.both_are_starting, self.may_start = threading.Event(), threading.Event()
        self._num_starting = itertools.count(1)

    def answer(self, method: str, path: str) -> bytes:
        """The JSON that answers a request."""
        address, _, query = path.partition("?")
        name = address.rpartition("/")[2]
        if name == "version":
            return b'{"ApiVersion": "1.43"}'
        if method == "DELETE":
            self.left.remove(name)
        elif name == "create":
            self.num_made += 1
            self.left.add(f"c{self.num_made}")
            return b'{"Id": "c%d"}' % self.num_made
        elif name == "commit":
            parameters = dict(pair.split("=") for pair in query.split("&"))
            self.left.add(f"{parameters['repo']}:{parameters['tag']}")
        elif name == "start":
            if next(self._num_starting) == 2:
                self.both_are_starting.set()
            assert self.may_start.wait(WAIT_S)
        return b"{}"


class Handler(socketserver.StreamRequestHandler):
    """Answers a connection's requests until one becomes a stream."""

    server: FakeDocker

    def handle(self) -> None:
        while line := self.rfile.readline():
            heads = dict(head.lower().split(b":", 1) for head in iter(self.rfile.readline, b"\r\n"))
            self._skip_body(heads)
            method, path = line.decode().split()[:2]
            if "/attach" in path:
                self.request.sendall(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
                self.rfile.read()
                return
            body = self.server.answer(method, path)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def _skip_body(self, heads: dict[bytes, bytes]) -> None:
        if b"transfer-encoding" in heads:
            while size := int(self.rfile.readline(), 16):
                self.rfile.read(size + 2)
            self.rfile.readline()
        self.rfile.read(int(heads.get(b"content-length", 0)))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    path = tmp_path / "docker.sock"
    with FakeDocker(str(path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        yield server
        server.may_start.set()
        server.shutdown()
        thread.join()


def test_a_pool_that_is_closed_ends_the_container_that_is_starting(docker: FakeDocker) -> None:
    pool = ContainerPool(Kind(image="image"))
    taking = threading.Thread(target=lambda: pool.take().close())  # starts one of its own, and one for the next
    taking.start()
    assert docker.both_are_starting.wait(WAIT_S)
    later = threading.Timer(0.2, docker.may_start.set)
    later.start()
    pool.close()
    assert docker.may_start.is_set()
    taking.join(WAIT_S)
    assert docker.num_made == 2 and docker.left == set()


def test_a_snapshot_that_is_made_while_the_pool_closes_is_removed(docker: FakeDocker) -> None:
    docker.may_start.set()
    pool = ContainerPool(Kind(image="image", num_warm=0))

    def prepare(_: Workspace) -> None:
        pool.close()

    with pytest.raises(SandboxError, match="was closed"):
        pool.take_prepared("key", prepare)
    assert docker.num_made == 1 and docker.left == set()
