"""Runs on a Ray cluster of three nodes, on this machine: the numbers of a local run, and deaths that it outlives."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster

from agentgym.errors import AgentGymError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.model_folder import load_decoder
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.record.line_reader import LineReader
from agentgym.trainers.checkpoints.export import find_checkpoint
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.lora import LoraConfig

pytestmark = pytest.mark.slow
LIMIT_S = 300.0
Play = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Three nodes of four cores each, as Ray counts them."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=4)
        nodes.add_node(num_cpus=4)
        yield nodes.address
    finally:
        if ray.is_initialized():
            ray.shutdown()
        nodes.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture
def run(small_run: TrainConfig) -> TrainConfig:
    run = replace(small_run, env="TextGame-v0", env_kwargs={"level": 1}, steps=6, tasks=4, group_size=4)
    return replace(run)


@pytest.fixture
def local_run(run: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run without a cluster, which several tests compare theirs with: played once."""
    folder = tmp_path_factory.getbasetemp() / "local_run"
    if not folder.exists():
        Trainer(run, folder).fit()
    return folder


def on(address: str, **settings: Any) -> ClusterConfig:
    small: dict[str, Any] = {"engines": 1, "workers": 2, "cpus": {"learner": 0.5, "engine": 0.5}}
    return ClusterConfig(address=address, **{**small, **settings})


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps_of(folder)]


def episodes(folder: Path) -> list[bytes]:
    with LineReader(folder / "episodes.jsonl.zst") as lines:
        return [*lines]


def test_one_rank_gives_the_bytes_of_a_local_run(
    cluster: str, run: TrainConfig, local_run: Path, tmp_path: Path
) -> None:
    trainer = Trainer(replace(run, executor="ray", ray=on(cluster, engines=2, workers=4)), tmp_path / "ray")
    trainer.fit()
    assert episodes(tmp_path / "ray") == episodes(local_run)
    assert losses(tmp_path / "ray") == losses(local_run)
    assert trainer._run.model.embed.is_meta, "this process has no weights"
    local = load_decoder(find_checkpoint(local_run).path)
    for mine, theirs in zip(trainer.model.parameters(), local.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_colocated_engines_that_give_their_memory_up_give_the_bytes_of_a_local_run(
    cluster: str, run: TrainConfig, local_run: Path, tmp_path: Path
) -> None:
    Trainer(replace(run, executor="ray", ray=on(cluster, layout="colocated")), tmp_path / "ray").fit()
    assert episodes(tmp_path / "ray") == episodes(local_run)
    assert losses(tmp_path / "ray") == losses(local_run)


def test_two_ranks_give_the_bytes_of_a_local_run_in_two_shares(cluster: str, run: TrainConfig, tmp_path: Path) -> None:
    run = replace(run, learner=replace(run.learner, shares=2, micro_batch_tokens=512))  # several of them in each share
    Trainer(run, tmp_path / "local").fit()
    Trainer(replace(run, executor="ray", ray=on(cluster, learners=2)), tmp_path / "ray").fit()
    assert episodes(tmp_path / "ray") == episodes(tmp_path / "local")
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")


@pytest.fixture
def lora(run: TrainConfig) -> TrainConfig:
    """A run that trains adapters, held to the weights without them."""
    return replace(run, learner=replace(run.learner, lora=LoraConfig(rank=4), kl=KLConfig(coefficient=0.1)), steps=4)


def test_one_rank_trains_adapters_with_the_bytes_of_a_local_run(
    cluster: str, lora: TrainConfig, tmp_path: Path
) -> None:
    Trainer(lora, tmp_path / "local").fit()
    Trainer(replace(lora, executor="ray", ray=on(cluster)), tmp_path / "ray").fit()
    assert episodes(tmp_path / "ray") == episodes(tmp_path / "local")
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")


ACTORS = {"EngineActor": "engine .", "Board": "the board", "EpisodeActor": "worker .", "RankActor": "learner ."}
"""The actors to kill, in this order: the board's death is noticed within half a second, in which a run may end."""


def test_a_run_outlives_the_death_of_each_actor(
    cluster: str, run: TrainConfig, local_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = replace(run, checkpoint=CheckpointConfig(every=2), executor="ray", ray=on(cluster, engines=2))
    folder = tmp_path / "ray"
    with killer_of(list(ACTORS), folder / "metrics.jsonl"):
        Trainer(run, folder).fit()
    assert episodes(folder) == episodes(local_run)
    assert losses(folder) == losses(local_run)
    for label in ACTORS.values():
        assert any(re.search(f"{label} is gone", message) for message in caplog.messages), caplog.messages


def test_a_run_that_learns_while_later_steps_are_played_outlives_each_death(
    cluster: str, run: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks, two engines, two workers: every group is learned from once, and no token is too old."""
    run = replace(run, max_staleness=2, checkpoint=CheckpointConfig(every=2), executor="ray")
    folder = tmp_path / "run"
    victims = ["EngineActor", "EpisodeActor", "RankActor"]
    with killer_of(victims, folder / "metrics.jsonl"):
        Trainer(replace(run, ray=on(cluster, learners=2, engines=2)), folder).fit()
    for victim in victims:
        assert any(re.search(f"{ACTORS[victim]} is gone", message) for message in caplog.messages), caplog.messages
    records = [record for record in read_episodes(folder) if record.phase == "train"]
    assert [record.trajectory.status.trainable for record in records] == [True] * 6 * 4 * 4
    assert len({(record.trajectory.group, record.trajectory.member) for record in records}) == len(records)
    ages = [
        record.step - 1 - int(version)
        for record in records
        for row in record.trajectory.rows
        for version in row.policy_versions[row.sampled_mask]
    ]
    assert 0 <= min(ages) and 0 < max(ages) <= 2
    lines = steps_of(folder)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert max(line.get("mismatch_max", 0.0) for line in lines) < 1e-4
    assert verify_run(folder).ok


def test_an_error_in_an_environment_is_shown_once_with_its_origin(
    cluster: str, run: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = replace(run, env="tests.trainers.monitoring.test_halt:Fragile", executor="ray", ray=on(cluster))
    with pytest.raises(AgentGymError, match="a wheel came off"):
        Trainer(replace(broken, sampler=replace(run.sampler, max_failure_rate=0.05)), tmp_path / "run").fit()
    messages = [message for message in caplog.messages if "a wheel came off" in message]
    assert len(messages) == 1
    assert "test_halt.py" in messages[0] and messages[0].rstrip().endswith("RuntimeError: a wheel came off")


def test_the_only_engine_is_waited_for_when_it_dies(
    cluster: str, run: TrainConfig, local_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ray"
    with killer_of(["EngineActor"], folder / "metrics.jsonl"):
        Trainer(replace(run, executor="ray", ray=on(cluster)), folder).fit()
    assert episodes(folder) == episodes(local_run)


def test_missing_engine_parts_are_reported_with_their_origin(cluster: str, run: TrainConfig, tmp_path: Path) -> None:
    greedy = replace(run, executor="ray", ray=on(cluster), local=replace(run.local, num_slots=10**10))
    with pytest.raises(AgentGymError, match=r"the key/value cache needs .* GiB") as raised:
        Trainer(greedy, tmp_path / "run").fit()
    assert any("raised in engine" in note for note in raised.value.__notes__)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_run_and_all_that_it_began(
    number: signal.Signals, code: int, tmp_path: Path, has_ended: Callable[[psutil.Process], bool]
) -> None:
    """Ctrl-C reaches the whole group of processes, SIGTERM the driver alone."""
    words = "train --env TextGame-v0 --executor ray --max-staleness 1 --ray.workers 2"
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "agentgym", *words.split(), "--eval.episodes", "0", "--output", str(folder)]
    driver = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            assert driver.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        below = psutil.Process(driver.pid).children(recursive=True)
        if number == signal.SIGINT:
            os.killpg(driver.pid, number)
        else:
            driver.send_signal(number)
        _, stderr = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == code
        assert b"interrupted after step" in stderr and b"Traceback" not in stderr
        while left := [process for process in below if not has_ended(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        driver.kill()


def test_an_actor_out_of_memory_is_reported_as_such(tmp_path: Path) -> None:
    """Ray is told to see a shortage where a hundredth of the memory is in use, which is always."""
    words = "train --env TextGame-v0 --executor ray --steps 1 --tasks 2 --group-size 2 --ray.max-restarts 0".split()
    command = [sys.executable, "-m", "agentgym", *words, "--output", str(tmp_path / "run")]
    environment = {**os.environ, "RAY_memory_usage_threshold": "0.01"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert re.search(r"error: \w+ \d is gone: Ray ended it, because its node was low on memory \(", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_cluster_that_is_too_small_is_refused_with_its_size(cluster: str, run: TrainConfig, tmp_path: Path) -> None:
    greedy = ClusterConfig(address=cluster, engines=40, start_s=3)
    with pytest.raises(AgentGymError, match=r"the cluster did not give .*CPU.* it has .*12"):
        Trainer(replace(run, executor="ray", ray=greedy), tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()


@contextmanager
def killer_of(kinds: Sequence[str], metrics: Path) -> Iterator[None]:
    """Kills a process of the actors of each kind while the block runs: the first in the second step, then each a step
    after the last."""
    ended = threading.Event()

    def kill_all() -> None:
        for steps, kind in enumerate(kinds, 1):
            while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
                assert not ended.wait(0.05), f"the run ended before {kind} was killed"
            kill_one(kind, ended)

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill_all)
        try:
            yield
        finally:
            ended.set()
        killer.result(LIMIT_S)


def kill_one(kind: str, ended: threading.Event) -> None:
    """Kills a process of the actors of a kind, as soon as there is one."""
    while not ended.wait(0.05):
        for process in psutil.Process().children(recursive=True):  # others on this machine may have a cluster too
            with suppress(psutil.Error):
                if any(f"ray::{kind}" in word for word in process.cmdline()):
                    process.kill()
                    return
    raise AssertionError(f"no process of {kind} runs")


def joining(address: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """A run that is to join a cluster, by somebody who has no token."""
    words = f"train --env TextGame-v0 --steps 1 --tasks 1 --group-size 2 --executor ray --ray.address {address}"
    command = [sys.executable, "-m", "agentgym", *words.split(), "--eval.episodes", "0", "--output", str(folder)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ, check=False)


def test_an_unanswered_address_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        started = time.monotonic()
        ended = joining(address, tmp_path / "run", tmp_path)
    assert time.monotonic() - started < 60
    assert ended.returncode == 1
    assert f"error: cannot join the Ray cluster at '{address}': nothing answers there" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


HEAD = """
from ray.cluster_utils import Cluster
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(nodes.address, flush=True)
input()
nodes.shutdown()
"""


def test_a_cluster_that_asks_for_a_token_is_named_with_what_opens_it(tmp_path: Path) -> None:
    environ = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
    with subprocess.Popen(
        [sys.executable, "-c", HEAD], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        patience = threading.Timer(LIMIT_S, head.kill)
        patience.start()
        try:
            address = head.stdout.readline().strip()
            ended = joining(address, tmp_path / "run", tmp_path)
            head.communicate("\n")
        finally:
            patience.cancel()
            head.kill()
    assert ended.returncode == 1
    assert f"error: cannot join the Ray cluster at '{address}'" in ended.stderr
    assert "set RAY_AUTH_MODE=token; see `ray status`" in ended.stderr
    assert not (tmp_path / "run").exists()
