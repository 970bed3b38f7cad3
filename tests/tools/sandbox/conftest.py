"""Sandboxes of each kind, opened by root and by an ordinary user, and what stands outside for attacks to reach."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest

from agentgym.tools.sandbox import Ended, Outcome, Sandbox, SandboxLimits, open_sandbox
from agentgym.tools.sandbox.box.task_count import TaskCount
from tests.tools.sandbox.cgroup import Cgroup

Call = dict[str, Any]
"""Arguments of `Sandbox.run`."""
ROOT = Path(__file__).parents[3]
SECRET = "the-secret-of-the-machine"
LIMITS = SandboxLimits(time_limit_s=8.0, memory_mb=256, num_processes=24, scratch_mb=16, output_kb=64)

DRIVER = """
import concurrent.futures, dataclasses, json, sys, time
from agentgym.tools.sandbox import SandboxLimits, open_sandbox
given = json.loads(sys.argv[1])
def run(call):
    started = time.monotonic()
    outcome = sandbox.run(**call)
    return {**dataclasses.asdict(outcome), "seconds": time.monotonic() - started, "files": sorted(outcome.files)}
with open_sandbox(given["backend"], limits=SandboxLimits(**given["limits"])) as sandbox:
    print(sandbox._server._process.pid if hasattr(sandbox, "_server") else "", flush=True)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        for line in sys.stdin:
            calls = [threads.submit(run, call) for call in json.loads(line)]
            print(json.dumps([call.result() for call in calls]), flush=True)
"""
"""Answers requests, those of a line at once, as whoever runs it; `seconds` are those that a caller waits."""

AS_ORDINARY_USER = """
mount -t tmpfs tmpfs /mnt && mkdir -p /mnt/python /mnt/site /mnt/repo /mnt/tmp && chmod 1777 /mnt/tmp || exit 1
mount --bind "$1" /mnt/python && mount --bind "$2" /mnt/site && mount --bind "$3" /mnt/repo || exit 1
shift 3
export TMPDIR=/mnt/tmp PYTHONPATH=/mnt/repo:/mnt/site HOME=/mnt/tmp
exec setpriv --reuid 1000 --regid 1000 --clear-groups /mnt/python/bin/"$@"
"""
IN_CGROUP = 'for folder in $1; do echo $$ > "$folder/cgroup.procs" || exit 1; done; shift; exec "$@"'
"""Python and the repository may be where only root looks: an ordinary user gets them at another place."""


@dataclass
class Outside:
    """What a machine has that no program in a box may reach."""

    folder: Path
    """Anybody may write it; `secret.txt` in it holds the secret."""
    sentinel: subprocess.Popen[bytes]
    """A process of the same user."""
    listeners: list[socket.socket]
    written_at: float
    names: dict[str, object]
    """What attacks know of it."""

    def assert_untouched(self) -> None:
        assert (self.folder / "secret.txt").read_text() == SECRET
        about = (self.folder / "secret.txt").stat()
        assert (about.st_mode & 0o777, about.st_uid, about.st_mtime == self.written_at) == (0o666, os.geteuid(), True)
        assert sorted(path.name for path in self.folder.iterdir()) == ["dgram", "secret.txt", "stream"]
        assert self.sentinel.poll() is None
        assert psutil.Process(self.sentinel.pid).rlimit(psutil.RLIMIT_NOFILE) == (64, 64)
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(1)


def _listeners(folder: Path) -> list[socket.socket]:
    listeners = []
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"\0agentgym-test-{os.getpid()}"),
        (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "stream")),
        (socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "dgram")),
    ):
        listener = socket.socket(family, kind)
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listener.setblocking(False)
        listeners.append(listener)
    return listeners


@pytest.fixture(scope="session")
def outside() -> Iterator[Outside]:
    folder = Path(tempfile.mkdtemp(prefix="agentgym-outside-"))
    sentinel = subprocess.Popen(["sh", "-c", "ulimit -n 64; exec sleep 3600"])
    listeners = []
    try:
        (folder / "secret.txt").write_text(SECRET)
        (folder / "secret.txt").chmod(0o666)
        listeners = _listeners(folder)
        for name in ("stream", "dgram"):
            (folder / name).chmod(0o666)
        folder.chmod(0o777)
        while psutil.Process(sentinel.pid).name() != "sleep":
            time.sleep(0.01)
        names = {"OUTSIDE": str(folder), "SECRET": str(folder / "secret.txt"), "SENTINEL": sentinel.pid}
        names |= {"PORT": listeners[0].getsockname()[1], "ABSTRACT": f"\0agentgym-test-{os.getpid()}"}
        yield Outside(folder, sentinel, listeners, (folder / "secret.txt").stat().st_mtime, names)
    finally:
        for listener in listeners:
            listener.close()
        sentinel.kill()
        sentinel.wait()
        shutil.rmtree(folder)


def num_below(server: psutil.Process) -> int:
    """Processes below the server's first one, dead ones included that nobody has waited for."""
    return len(server.children(recursive=True))


def num_in_containers() -> int:
    """Processes of all containers but the first of each; a container that is being removed has none."""
    total = 0
    with contextlib.closing(docker.DockerClient.from_env()) as client:
        for container in client.api.containers():
            with contextlib.suppress(docker.errors.APIError):
                total += max(0, len(client.api.top(container["Id"])["Processes"] or ()) - 1)
    return total


class Opened:
    """A sandbox, whoever opened it."""

    def __init__(
        self, backend: str, server: str, run_all: Callable[[list[Call]], list[Outcome]], *, is_counted: bool = False
    ) -> None:
        self.backend, self.run_all = backend, run_all
        self.is_counted = is_counted
        """True where a cgroup counts the tasks of a landlock box: a fork too many fails, and ends nothing."""
        self.num_processes = (
            num_in_containers if backend == "docker" else partial(num_below, psutil.Process(int(server)))
        )
        self._at_rest = self.num_processes()

    def assert_at_rest(self) -> None:
        """What an execution left behind: nothing. (A supervisor ends after it has answered.)"""
        deadline = time.monotonic() + 10
        while self.num_processes() > self._at_rest and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.num_processes() == self._at_rest


@contextlib.contextmanager
def _by_ourselves(backend: str) -> Iterator[Opened]:
    with open_sandbox(backend, limits=LIMITS) as sandbox, ThreadPoolExecutor() as threads:

        def run_all(calls: list[Call]) -> list[Outcome]:
            begun = [threads.submit(sandbox.run, **call) for call in calls]
            return [future.result() for future in begun]

        server = "" if backend == "docker" else str(sandbox._server._process.pid)  # type: ignore[attr-defined]
        yield Opened(backend, server, run_all, is_counted=backend == "landlock" and _can_count_tasks())


def _can_count_tasks() -> bool:
    count = TaskCount(1)
    count.close()
    return bool(count.folder)


@contextlib.contextmanager
def by_driver(
    backend: str, limits: SandboxLimits = LIMITS, *, is_ordinary: bool = True, cgroup: Cgroup | None = None
) -> Iterator[Opened]:
    """A sandbox that a process of its own opened: as an ordinary user or not, in a cgroup or not."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = [sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT)]
    settings = json.dumps({"backend": backend, "limits": vars(limits)})
    command = [sys.executable, "-c", DRIVER, settings]
    if is_ordinary:
        command = ["unshare", "--mount", "sh", "-c", AS_ORDINARY_USER, "sh", *places, version, "-c", DRIVER, settings]
    if cgroup is not None:
        command = ["sh", "-c", IN_CGROUP, "sh", " ".join(map(str, cgroup.folders)), *command]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin and driver.stdout

    def run_all(calls: list[Call]) -> list[Outcome]:
        driver.stdin.write(json.dumps(calls) + "\n")
        driver.stdin.flush()
        outcomes = json.loads(driver.stdout.readline())
        return [
            Outcome(**{**outcome, "ended": Ended(outcome["ended"]), "files": dict.fromkeys(outcome["files"], b"")})
            for outcome in outcomes
        ]

    try:
        line = driver.stdout.readline()
        assert line, "the ordinary user's sandbox did not open; see standard error"
        yield Opened(backend, line.strip(), run_all)
    finally:
        driver.stdin.close()
        driver.wait(20)
        driver.stdout.close()


DOCKER = pytest.mark.docker
KINDS = (
    "namespaces-root",
    "namespaces-ordinary",
    "landlock-root",
    "landlock-ordinary",
    pytest.param("docker-root", marks=DOCKER),
)


def backend_and_user(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The backend and the user of one of the `KINDS`; for Docker, with a daemon."""
    backend, _, user = request.param.partition("-")
    if backend == "docker":
        request.getfixturevalue("docker_address")
    return backend, user


@pytest.fixture(scope="session", params=[*KINDS, pytest.param("docker-ordinary", marks=DOCKER)])
def opened(request: pytest.FixtureRequest, outside: Outside) -> Iterator[Opened]:
    """Each kind of sandbox, as root and as an ordinary user."""
    backend, user = backend_and_user(request)
    is_root = os.geteuid() == 0
    if user == "root" and not is_root:
        pytest.skip("these tests run as an ordinary user: only root can open root's sandbox")
    os.environ["AGENTGYM_TEST_TOKEN"] = SECRET
    try:
        with by_driver(backend) if user == "ordinary" and is_root else _by_ourselves(backend) as opened_sandbox:
            yield opened_sandbox
    finally:
        del os.environ["AGENTGYM_TEST_TOKEN"]


@pytest.fixture(scope="module", params=["namespaces", "landlock", pytest.param("docker", marks=DOCKER)])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "docker":
        request.getfixturevalue("docker_address")
    with open_sandbox(request.param, limits=LIMITS) as open_box:
        yield open_box


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def served(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox whose boxes a server process of ours forks."""
    with open_sandbox(request.param, limits=LIMITS) as open_box:
        yield open_box
