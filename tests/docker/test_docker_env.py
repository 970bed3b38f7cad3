"""Environments in containers: what commands may do, snapshots, images, and what is left when a process is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest

from agentgym.envs import Action, DockerEnv, make_env, policy_for
from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault
from agentgym.tools.containers.daemon import Daemon
from agentgym.tools.containers.pool import ContainerPool, Kind, _pools
from agentgym.tools.containers.python_image import IMAGE, host_image
from agentgym.tools.containers.reaper import reap_resources
from agentgym.tools.containers.workspace import ContainerLimits, Workspace
from agentgym.types import Message, ToolCall

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples/container_env.py'}:LogSearch"
LIMITS = ContainerLimits(memory_mb=128, num_processes=32, time_limit_s=3.0, output_kb=8)
NETWORKS = {"bridge", "host", "none"}
DRIVER = """
import sys
from agentgym.envs import DockerEnv
class Work(DockerEnv):
    dockerfile = sys.argv[1]
    num_warm = 2
    def start(self, options):
        number, keeps = self.np_random.integers(5), bool(self.np_random.integers(2))
        self.begin(files={"f": b"x"}, setup=f"echo {number} > g", keeps=keeps)
        return "Work."
env = Work()
print("begun", flush=True)
for seed in range(10_000):
    env.reset(seed=seed)
    print(env.run("cat /made; sleep 300 >/dev/null 2>&1 & echo on").output, flush=True)
"""


@pytest.fixture
def client(docker_address: str) -> Iterator[docker.DockerClient]:
    with contextlib.closing(docker.DockerClient(base_url=docker_address)) as docker_client:
        yield docker_client
    while _pools:
        _pools.popitem()[1].close()
    assert_nothing_left(docker_address)


def assert_nothing_left(address: str) -> None:
    with contextlib.closing(docker.DockerClient(base_url=address)) as client:
        wait_for(lambda: not client.api.containers(all=True))
        assert {name.partition(":")[0] for image in client.images.list() for name in image.tags} <= {IMAGE}
        assert {network.name for network in client.networks.list()} <= NETWORKS


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Work(DockerEnv):
    limits = LIMITS
    settings: dict[str, Any] = {}

    def start(self, options: dict[str, Any]) -> str:
        self.begin(**{**self.settings, **options})
        return "Work."


def shell(env: DockerEnv, command: str) -> str:
    call = ToolCall("1", "shell", {"command": command})
    return env.step(Action.from_message(Message("assistant", "", tool_calls=(call,))))[0]


def test_the_example_is_an_environment_that_its_oracle_solves(client: docker.DockerClient) -> None:
    assert len((ROOT / "examples/container_env.py").read_text().splitlines()) <= 60
    env = make_env(EXAMPLE)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        policy = policy_for(env, "oracle")
        policy.reset(env, observation, seed)
        reward, over = 0.0, False
        while not over:
            observation, reward, over, *_ = env.step(Action.from_message(policy.act(observation)))
        assert reward == 1.0
    env.close()


def test_commands_keep_files_and_are_held_by_limits(client: docker.DockerClient) -> None:
    env = Work()
    env.reset(seed=0, options={"files": {"a/b.txt": b"hello"}})
    assert shell(env, "cat a/b.txt; echo more > a/c.txt; id -u") == "hello65534"
    answer = shell(env, "cat a/c.txt; touch /etc/x; exit 3")
    assert answer == "more\ntouch: cannot touch '/etc/x': Permission denied\n[exit code 3]"
    assert env.container.read("a/c.txt") == b"more\n" and env.container.read("a") is None
    assert "not permitted" in shell(env, "python3 -c 'import os; os.setuid(0)'")
    assert "[Errno 101]" in shell(env, "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 80))'")
    assert "after 3 s" in shell(env, "sleep 60 & (trap '' TERM HUP INT; sleep 60)")
    assert "sleep" not in shell(env, "cat /proc/[0-9]*/comm")
    assert shell(env, f"echo {'x' * (1 << 17)}").startswith("not run: a command has at most 131071 bytes")
    assert shell(env, f"echo {'x' * 131058} | wc -c") == "131059"
    with pytest.raises(ConfigError, match="positive number of seconds, got 0"):
        env.run("true", time_limit_s=0)
    assert "more than 8 KiB" in shell(env, "yes") and shell(env, "ls a") == "b.txt\nc.txt"
    shell(env, "f() { f | f & }; f; sleep 30")
    _, _, over, _, _ = env.step("shell echo on")
    assert over or env.container.is_open
    env.close()
    wait_for(lambda: len(client.api.containers(all=True)) <= 1)


def test_a_command_that_takes_more_memory_than_it_may_is_ended(client: docker.DockerClient) -> None:
    class Patient(Work):
        limits = replace(LIMITS, time_limit_s=60.0)  # a busy machine takes its time to fill it

    env = Patient()
    env.reset(seed=0)
    assert "exit code" in shell(env, "python3 -c 'bytearray(1 << 28)'")
    env.close()


def test_a_task_is_set_up_once_and_each_episode_has_a_copy(client: docker.DockerClient) -> None:
    env, second_env = Work(), Work()
    options = {"files": {"f": b"1"}, "setup": "date +%s%N > made", "keeps": True}
    env.reset(seed=0, options=options)
    content = shell(env, "cat made; echo changed > f")
    second_env.reset(seed=0, options=options)
    assert shell(second_env, "cat made f") == f"{content}\n1"
    second_env.reset(seed=0, options={**options, "files": {"f": b"2"}})
    assert shell(second_env, "cat f") == "2" and shell(second_env, "cat made") != content
    assert len(client.images.list("agentgym-snapshot")) == 2
    with pytest.raises(EnvironmentFault, match=r"setup of a task ended with 5: oh"):
        env.reset(seed=0, options={"setup": "echo oh; exit 5"})
    env.close()
    second_env.close()


def test_a_pool_that_ends_leaves_the_snapshots_of_another(client: docker.DockerClient) -> None:
    def prepare(workspace: Workspace) -> None:
        workspace.write({"f": b"1"})

    first, second = (ContainerPool(Kind(limits=LIMITS, num_warm=0)) for _ in range(2))
    for pool in (first, second):
        pool.take_prepared("key", prepare).close()
    first.close()
    with contextlib.closing(second.take_prepared("key", prepare)) as workspace:
        assert workspace.read("f") == b"1"
    second.close()


def test_the_reaper_keeps_snapshots_of_living_processes_and_derived_images(
    client: docker.DockerClient, tmp_path: Path
) -> None:
    env = Work()
    options = {"files": {"f": b"1"}, "keeps": True}
    env.reset(seed=0, options=options)
    with contextlib.closing(Daemon()) as daemon:
        (tmp_path / "Dockerfile").write_text(f"FROM {host_image(daemon)}\n")
        client.images.build(path=str(tmp_path), rm=True, tag="agentgym-test:own")
        env.close()
        while any(pool._starting for pool in _pools.values()):
            time.sleep(0.05)
        assert reap_resources(daemon).images == ()
    env.reset(seed=0, options=options)
    assert shell(env, "cat f") == "1"
    env.close()
    client.images.remove("agentgym-test:own")


def test_an_image_is_built_from_a_dockerfile_and_wrong_ones_are_refused(
    client: docker.DockerClient, tmp_path: Path
) -> None:
    class Own(Work):
        dockerfile = str(tmp_path)

    with contextlib.closing(Daemon()) as daemon:
        host = host_image(daemon)
    (tmp_path / "made").write_text("by a Dockerfile\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {host}\nCOPY made /made\n")
    env = Own()
    env.reset(seed=0)
    assert shell(env, "cat /made") == "by a Dockerfile"
    env.close()
    while _pools:
        _pools.popitem()[1].close()
    (tmp_path / "Dockerfile").write_text(f"FROM {host}\nCOPY missing /made\n")
    with pytest.raises(EnvironmentFault, match="does not build"):
        Own().reset(seed=0)
    for wrong in ({"user": "root"}, {"user": "0:0"}, {"dockerfile": "/nowhere"}, {"image": "a", "dockerfile": "b"}):
        with pytest.raises(ConfigError):
            Kind(**wrong)  # type: ignore[arg-type]


def test_without_a_daemon_an_episode_is_an_environment_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr("agentgym.tools.containers.pool._pools", {})
    with pytest.raises(AgentGymError, match="needs Docker: no Docker daemon answers"):
        Work().reset(seed=0)


def test_a_process_killed_at_any_moment_leaves_nothing_behind_the_reaper(
    client: docker.DockerClient, docker_address: str, tmp_path: Path
) -> None:
    draw = random.Random(7)
    with contextlib.closing(Daemon()) as daemon:
        host = host_image(daemon)
    (tmp_path / "image").mkdir()
    (tmp_path / "image/Dockerfile").write_text(f"FROM {host}\nCOPY Dockerfile /made\n")
    (tmp_path / "tmp").mkdir()
    for _ in range(6):
        command = [sys.executable, "-c", DRIVER, str(tmp_path / "image")]
        env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert owner.stdout and owner.stdout.readline() == "begun\n"
        num_awaited = draw.randrange(3)
        while num_awaited:
            num_awaited -= owner.stdout.readline() == "on\n"
        time.sleep(draw.uniform(0.0, 4.0))
        started = psutil.Process(owner.pid).children(recursive=True)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
        with contextlib.closing(Daemon()) as daemon:
            wait_for(lambda: not any(container["State"] == "running" for container in client.api.containers(all=True)))
            reap_resources(daemon)
            wait_for(lambda: not client.api.containers(all=True))
            reap_resources(daemon)
        assert_nothing_left(docker_address)
        assert not any(process.is_running() for process in started) and not list((tmp_path / "tmp").iterdir())
