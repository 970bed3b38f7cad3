"""Tasks in Harbor's form, in containers built from their Dockerfiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from agentgym.errors import EnvironmentFault
from agentgym.testing import examine_env
from agentgym.tools.containers.daemon import Daemon
from agentgym.tools.containers.pool import _pools
from agentgym.tools.containers.python_image import host_image
from tests.envs.adapters.harbor_folders import (
    CONFIG,
    TASK_FOLDERS,
    call_shell,
    finish,
    open_task,
    play_policy,
    write_task,
)

pytestmark = pytest.mark.docker
BASE = ("python", "3.12-slim")
"""The image that the tasks begin with; here it is this machine's Python, as no registry is reached."""


@pytest.fixture(autouse=True)
def base_image(docker_address: str) -> Iterator[None]:
    daemon = Daemon()
    name = host_image(daemon)
    with contextlib.closing(docker.DockerClient(base_url=docker_address)) as client:
        client.images.get(name).tag(*BASE)
        yield
        while _pools:
            _pools.popitem()[1].close()
        daemon.close()
        client.images.remove(":".join(BASE))
        assert not client.api.containers(all=True)
        assert [tag for image in client.images.list() for tag in image.tags] == [name]


@pytest.mark.parametrize("task", TASK_FOLDERS, ids=lambda task: task.name)
def test_a_kept_task_passes_its_checks_in_a_container(task: Path) -> None:
    only = ["oracle", "cheat", "reproducible", "answer leak"]
    verdicts = examine_env(f"harbor/{task}", {"backend": "docker", "max_turns": 1}, only=only)
    assert {verdict.verdict for verdict in verdicts} == {"passed"}, verdicts


def test_a_container_has_what_its_dockerfile_makes_and_no_way_to_the_verdict(tmp_path: Path) -> None:
    lines = "FROM python:3.12-slim\nENV A=1\nWORKDIR /work/deep\nCOPY a.txt /data/a.txt\nRUN echo 2 > made\n"
    write_task(tmp_path, environment__Dockerfile=lines, **{"environment__a.txt": "a\n"})
    tricks = (
        "echo 1 > /logs/verifier/reward.txt",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "mv /logs /gone; ln -s /tmp /logs; rmdir /tests; ln -s /tmp /tests",
        "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)",
        "kill -9 -1",
    )
    with contextlib.closing(open_task(tmp_path, "docker")) as env:
        assert call_shell(env, "pwd; echo $A; cat made /data/a.txt; echo b > /data/b.txt; ls /data /tests /solution")[
            0
        ].startswith("/work/deep\n1\n2\na\n")
        for trick in tricks:
            env.reset(seed=0)
            assert call_shell(env, trick)[1] == 0.0
            assert finish(env)[1] == 0.0, trick
        assert play_policy(env, "oracle", 0) == 1.0


def test_a_program_that_the_verifier_runs_cannot_change_the_tests(tmp_path: Path) -> None:
    test = (
        "#!/bin/sh\nsh /work/program\n[ -e good ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n"
    )
    write_task(tmp_path, environment__Dockerfile="FROM python:3.12-slim\nWORKDIR /work\n", tests__test_sh=test)
    with contextlib.closing(open_task(tmp_path, "docker")) as env:
        call_shell(
            env, "echo 'echo echo 1 \">\" /logs/verifier/reward.txt >> /tests/test.sh; rm -rf /tests' > /work/program"
        )
        assert finish(env)[1] == 0.0


def test_a_bad_verifier_or_dockerfile_is_a_fault_and_nothing_is_left(tmp_path: Path) -> None:
    for line, limit_s, words in (
        ("sleep 100", 2, "was stopped after 2 s"),
        ("yes | head -c 1000000000", 20, "wrote no reward"),  # ended at the size that one file may have
        ("true", 2, "wrote no reward"),
    ):
        write_task(tmp_path / "a", tests__test_sh=f"{line}\n", task_toml=CONFIG.replace("= 20", f"= {limit_s}"))
        with (
            contextlib.closing(open_task(tmp_path / "a", "docker")) as env,
            pytest.raises(EnvironmentFault, match=words),
        ):
            finish(env)
    write_task(tmp_path / "b", environment__Dockerfile="FROM python:3.12-slim\nRUN false\n")
    with pytest.raises(EnvironmentFault, match="does not build"):
        open_task(tmp_path / "b", "docker")
