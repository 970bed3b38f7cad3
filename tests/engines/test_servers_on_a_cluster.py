"""Servers that engine actors of a Ray run own: they sample, take weights, are begun anew, and leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from agentgym.cli.main import main
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.settings.cluster import ClusterConfig

pytestmark = pytest.mark.engine
LIMIT_S = 600.0
LAUNCHED = {"sglang": "agentgym_sglang_launch", "vllm": "vllm.entrypoints"}
Train = Callable[..., Any]


def words_of(engine: str, python: str, folder: Path) -> list[str]:
    """The command line of a small run on one server."""
    words = f"train --env TextGame-v0 --executor ray --engine {engine} --server.python {python} --steps 4 --tasks 3"
    words += " --group-size 4 --eval.episodes 0 --ray.workers 2 --ray.cpus worker=0.2"
    words += " --ray.layout colocated" * (engine == "sglang")  # it sleeps, which on CPU frees nothing
    return [*words.split(), "--output", str(folder)]


def servers_below(parent: psutil.Process, engine: str) -> list[psutil.Process]:
    """The servers that run below a process, without their guards and children."""
    processes = []
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(LAUNCHED[engine] in word for word in words) and not any("child_guard" in word for word in words):
                processes.append(process)
    return processes


def until(happens: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happens():
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT_S:g} s"
        time.sleep(0.1)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_run(folder: Path, steps: int) -> None:
    """Each step's tokens bear the version before it, have the trainer's logprobs, and none is lost or twice there."""
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == [line["sync_version"] for line in lines] == list(range(1, steps + 1))
    assert max(line.get("mismatch_max", 0.0) for line in lines) < 1e-4
    records = [record for record in read_episodes(folder) if record.phase == "train"]
    assert (
        len({(record.trajectory.group, record.trajectory.member) for record in records}) == len(records) == steps * 12
    )
    assert all(record.trajectory.status.trainable for record in records)
    for record in records:
        for row in record.trajectory.rows:
            assert set(row.policy_versions[row.sampled_mask]) <= {record.step - 1}
    assert verify_run(folder).ok


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_actor_begins_its_server_anew_with_the_newest_weights(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The only server is killed after the second step: the run waits for the next one."""
    folder, ourselves = tmp_path / "run", psutil.Process()
    shared = servers_below(ourselves, engine)
    killed: list[int] = []

    def own_servers() -> list[psutil.Process]:
        return [process for process in servers_below(ourselves, engine) if process not in shared]

    def kill() -> None:
        until(lambda: len(lines_of(folder)) >= 2, "the second step")
        for process in own_servers():
            killed.append(process.pid)
            with suppress(psutil.NoSuchProcess):  # it ends with the process before it
                process.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert main(words_of(engine, request.getfixturevalue(f"{engine}_python"), folder)) == 0
    killer.join(LIMIT_S)
    assert killed
    check_run(folder, steps=4)
    assert f"engine 0: the {engine} server ended" in capfd.readouterr().err
    until(lambda: not own_servers(), "the end of the servers")


def test_a_driver_that_is_killed_leaves_no_server(
    sglang_python: str, tmp_path: Path, has_ended: Callable[[psutil.Process], bool]
) -> None:
    folder = tmp_path / "run"
    words = [sys.executable, "-m", "agentgym", *words_of("sglang", sglang_python, folder)]
    driver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: driver.poll() is not None or bool(lines_of(folder)), "the first step")
    below = psutil.Process(driver.pid).children(recursive=True)
    assert any("sglang" in " ".join(commands(process)) for process in below)
    driver.kill()
    driver.wait()
    until(lambda: all(has_ended(process) for process in below), "the end")


def commands(process: psutil.Process) -> Sequence[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ()


def test_servers_that_run_already_serve_a_run_on_a_cluster(
    sglang_server: ServerProcess, small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    """Groups go on over updates there too, and the server lives on."""
    ray = ClusterConfig(workers=2, cpus={"learner": 0.5, "worker": 0.2})
    config = replace(
        small_run, engine="sglang", server=ServerConfig(urls=(sglang_server.url,)), executor="ray", ray=ray
    )
    config = replace(config, max_staleness=1, steps=3)
    steps: list[StepMetrics] = list(train(config, tmp_path / "run")[1].steps)
    assert [step.sync.version for step in steps] == [1, 2, 3]
    assert all(step.update is None or step.update.mismatch_max < 1e-4 for step in steps)
    assert sglang_server.alive
    assert verify_run(tmp_path / "run").ok
