"""The box of containers: kept warm, thrown away when spoilt, gone with its owner, and reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import psutil
import pytest

import agentgym
from agentgym.errors import ConfigError, SandboxError
from agentgym.tools.containers.daemon import Daemon
from agentgym.tools.containers.python_image import host_image_name
from agentgym.tools.containers.reaper import reap_resources
from agentgym.tools.sandbox import Ended, SandboxLimits, open_sandbox

pytestmark = pytest.mark.docker
LIMITS = SandboxLimits(time_limit_s=5.0, memory_mb=128, num_processes=16, scratch_mb=8)
OWNER = """
import sys
from agentgym.tools.sandbox import open_sandbox
sandbox = open_sandbox("docker")
session = sandbox.session()
session.run("x = 1")
print("up", flush=True)
sandbox.run("import time; time.sleep(9)")
"""
MEMORY = """
import os, time
for _ in range(8):
    if not os.fork():
        kept = b'x' * (90 << 20)
        time.sleep(60)
time.sleep(60)
"""


@pytest.fixture
def client(docker_address: str) -> Iterator[docker.DockerClient]:
    with contextlib.closing(docker.DockerClient(base_url=docker_address)) as docker_client:
        yield docker_client


def wait_for(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_warm_program_takes_less_than_100_ms_and_sees_nothing_of_the_last(client: docker.DockerClient) -> None:
    with open_sandbox("docker", limits=LIMITS) as sandbox:
        code = "import os; print(os.listdir()); os.makedirs('d/e'); open('d/e/f', 'w'); os.chmod('d', 0)"
        seconds = []
        for _ in range(20):
            started = time.perf_counter()
            assert sandbox.run(code).stdout == "[]\n"
            seconds.append(time.perf_counter() - started)
        assert sorted(seconds)[10] < 0.1
        assert len(client.containers.list()) == 1
    assert client.containers.list(all=True) == []


def test_a_container_is_held_as_its_box_promises(client: docker.DockerClient) -> None:
    with open_sandbox("docker", limits=LIMITS):
        (container,) = client.containers.list()
        host = container.attrs["HostConfig"]
        assert (host["ReadonlyRootfs"], host["NetworkMode"], host["CapDrop"]) == (True, "none", ["ALL"])
        assert (host["PidsLimit"], host["NanoCpus"], host["Memory"]) == (19, 10**9, (128 + 8 + 64) << 20)
        assert host["MemorySwap"] == host["Memory"] and "no-new-privileges" in host["SecurityOpt"]
        assert any(option.startswith("seccomp={") for option in host["SecurityOpt"])
        assert container.labels["agentgym.owner"].startswith(f"{os.getpid()}:") and container.labels["agentgym.run"]


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import os, signal, time; os.kill(-1, signal.SIGSTOP); time.sleep(60)", Ended.TIME_LIMIT),
        ("import os, signal; os.kill(-1, signal.SIGKILL)", Ended.KILLED),
        ("import os, signal, time; os.kill(1, signal.SIGKILL); time.sleep(60)", Ended.TIME_LIMIT),
    ],
)
def test_a_program_that_ends_or_stops_what_is_around_it_loses_its_container(
    client: docker.DockerClient, code: str, ended: Ended
) -> None:
    with open_sandbox("docker", limits=LIMITS) as sandbox:
        before = {container.id for container in client.containers.list()}
        with ThreadPoolExecutor() as threads:
            attack = threads.submit(sandbox.run, code, time_limit_s=1.0)
            assert all(sandbox.run("print(1)").ok for _ in range(5))
        assert attack.result().ended is ended and attack.result().seconds <= 2.0
        assert sandbox.run("print(2)").stdout == "2\n"
        wait_for(lambda: len({container["Id"] for container in client.api.containers()} & before) == 0)
        with sandbox.session() as session:
            assert session.run("x = 1").ok
            lost = session.run(code, time_limit_s=1.0)
            assert lost.ended is ended and (lost.is_lost or lost.rolled_back)


def test_a_cell_after_one_that_the_kernel_ended_for_memory_runs(client: docker.DockerClient) -> None:
    with open_sandbox("docker", limits=LIMITS) as sandbox, sandbox.session() as session:
        for _ in range(4):
            assert session.run(MEMORY).ended is Ended.MEMORY
            assert session.run("print(1)").ok


def test_the_data_of_tasks_is_taken_out_of_packages(client: docker.DockerClient) -> None:
    package = Path(agentgym.__file__).parent
    code = f"import os; print(os.listdir({str(package / 'envs/data')!r}), os.path.exists({str(package / 'envs')!r}))"
    with open_sandbox("docker", limits=LIMITS, packages=[package.parent]) as sandbox:
        assert sandbox.run(code).stdout == "[] True\n"


def test_sixty_programs_leave_no_container_and_no_open_file(client: docker.DockerClient) -> None:
    codes = ["print(1)", "import os; os.fork(); open('left', 'w')", "while True: pass", "1 / 0"]
    with open_sandbox("docker", limits=LIMITS) as sandbox, ThreadPoolExecutor(4) as threads:
        ended = [
            outcome.ended for outcome in threads.map(lambda n: sandbox.run(codes[n % 4], time_limit_s=0.3), range(60))
        ]
        assert ended.count(Ended.TIME_LIMIT) >= 15
        wait_for(lambda: len(client.api.containers()) == len(sandbox._idle))  # others are being removed
        assert len(client.api.containers()) <= 4
        assert all(len(container.top()["Processes"]) == 1 for container in client.containers.list())
        num_open = psutil.Process().num_fds()
        for n in range(20):
            sandbox.run(codes[n % 2])
        assert psutil.Process().num_fds() <= num_open
    assert client.containers.list(all=True) == []


def test_a_removed_container_is_the_sandboxs_fault_and_is_replaced(
    client: docker.DockerClient,
) -> None:
    with open_sandbox("docker", limits=LIMITS) as sandbox:
        for container in client.containers.list():
            container.remove(force=True)
        assert sandbox.run("print(1)").ok
        session = sandbox.session()
        for container in client.containers.list():
            container.remove(force=True)
        with pytest.raises(SandboxError, match="container"):
            session.run("1")
        session.close()
        assert sandbox.run("print(1)").ok


def test_containers_end_with_their_process_and_the_reaper_removes_the_rest(
    client: docker.DockerClient,
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout and owner.stdout.readline() == "up\n"
    wait_for(lambda: len(client.api.containers()) == 2)
    with contextlib.closing(Daemon()) as daemon:
        assert reap_resources(daemon).containers == () and len(client.containers.list()) == 2
        left = client.containers.list()[0]
        left.pause()  # it cannot notice that its input ended
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
        wait_for(lambda: len(client.api.containers(all=True)) == 1)
        assert reap_resources(daemon).containers == (left.name,)
        assert client.containers.list(all=True) == []
        assert reap_resources(daemon).containers == () and client.images.get(host_image_name())


def test_an_image_of_ones_own_is_used_and_a_wrong_one_refused(client: docker.DockerClient, tmp_path: Path) -> None:
    with open_sandbox("docker", limits=LIMITS):
        (tmp_path / "Dockerfile").write_text(f"FROM {host_image_name()}\n")
    client.images.build(path=str(tmp_path), rm=True, tag="agentgym-test:own")
    (tmp_path / "Dockerfile").write_text("FROM agentgym-test:own\nVOLUME /data\n")
    client.images.build(path=str(tmp_path), rm=True, tag="agentgym-test:volume")
    (tmp_path / "Dockerfile").write_text("FROM agentgym-test:own\nENV PATH=/nowhere\n")
    client.images.build(path=str(tmp_path), rm=True, tag="agentgym-test:bare")
    with open_sandbox("docker", limits=LIMITS, image="agentgym-test:own") as sandbox:
        assert sandbox.run("print(6 * 7)").stdout == "42\n"
    with pytest.raises(ConfigError, match=r"'agentgym-test:volume' has volumes \(/data\)"):
        open_sandbox("docker", image="agentgym-test:volume")
    with pytest.raises(ConfigError, match="docker pull agentgym-test:none"):
        open_sandbox("docker", image="agentgym-test:none")
    with pytest.raises(SandboxError, match="python3"):
        open_sandbox("docker", image="agentgym-test:bare")
    assert [
        (container.attrs["Config"]["Image"], container.status) for container in client.containers.list(all=True)
    ] == []
    for name in ("bare", "volume", "own"):
        client.images.remove(f"agentgym-test:{name}", force=True)
