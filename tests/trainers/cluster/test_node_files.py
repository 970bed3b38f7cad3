"""Nodes that share no file system: they fetch the run's folders, and what they write arrives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster

from agentgym.embedded import embedded_folder
from agentgym.errors import EngineError
from agentgym.trainers.cluster import node_files
from agentgym.trainers.cluster.node_files import FileServer, NodeFiles
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.cluster import ClusterConfig

LIMIT_S = 60.0
FAR_NODE = 'mount -t tmpfs hidden "$1" && exec ray start --address "$2" --num-cpus 3 --block'


class HereServer:
    """A file server in this process, asked as one in an actor is."""

    def __init__(self, *roots: Path) -> None:
        self.server = FileServer([str(root) for root in roots])

    def files(self, run: str, monkeypatch: pytest.MonkeyPatch) -> NodeFiles:
        def ask(_: NodeFiles, method: Callable[..., Any], *arguments: Any) -> Any:
            return getattr(self.server, method.__name__)(*arguments)

        monkeypatch.setattr(NodeFiles, "_ask", ask)
        return NodeFiles(run, self)  # type: ignore[arg-type]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process, as on a node of its own."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(node_files, "_locks", {})
    monkeypatch.setattr(node_files, "PIECE_BYTES", 1000)
    return place


def test_a_folder_is_fetched_where_it_is_not_or_is_another(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "model"
    there.mkdir()
    (there / "config.json").write_text("{}")
    (there / "model.safetensors").write_bytes(os.urandom(2500))
    (there / "empty.txt").touch()
    server = HereServer(there)
    files = server.files("run-a", monkeypatch)
    assert files.folder(str(there)) == there
    with monkeypatch.context() as elsewhere:
        own_listing = node_files._listing
        elsewhere.setattr(node_files, "_listing", lambda _: [])
        elsewhere.setattr(server.server, "listing", lambda folder: own_listing(Path(folder)))
        copy = files.folder(str(there))
        assert copy.parent.parent == temporary and copy == files.folder(str(there))
        for file in there.iterdir():
            assert (copy / file.name).read_bytes() == file.read_bytes()
        stale = [(name, size, 0) for name, size, _ in own_listing(there)]
        elsewhere.setattr(node_files, "_listing", lambda _: stale)
        assert files.folder(str(there)) == copy, "files of the same sizes may be those of another run"
        small = files.folder(str(there), has_weights=False)
        assert sorted(path.name for path in small.iterdir()) == ["config.json", "empty.txt"]
    with pytest.raises(EngineError, match="in none of the run's folders"):
        server.server.read(str(tmp_path / "model2" / "x"), 0)
    with pytest.raises(EngineError, match="in none of the run's folders"):
        server.server.write(f"{there}/../x", 0, b"")


def test_what_is_written_on_another_node_arrives(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "run"
    there.mkdir()
    files = HereServer(there).files("run-a", monkeypatch)
    content = {"a.bin": os.urandom(2000), "learner/b.bin": os.urandom(2500), "learner/c": b""}

    def write(folder: Path) -> Path:
        for name, piece in content.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(piece)
        return folder

    assert temporary in files.write(str(there), ".marker", write).parents
    assert {name: (there / name).read_bytes() for name in content} == content
    (there / ".marker").touch()
    assert files.write(str(there), ".marker", write) == there


def test_copies_of_runs_that_have_ended_are_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, alive = (temporary / f"agentgym-files-{name}" for name in ("ended", "alive"))
    holder = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); input()"
    for folder in (ended, alive):
        folder.mkdir()
        (folder / ".in-use").touch()
    command = [sys.executable, "-c", holder, str(alive / ".in-use")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        home = HereServer().files("new", monkeypatch)._home()
        process.communicate("\n")
    assert home.is_dir() and alive.is_dir() and not ended.exists()


@pytest.fixture
def far_cluster(tmp_path: Path) -> Iterator[str]:
    """Two nodes, of which the second one does not see the test's folder."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own needs the rights of root: unshare --mount")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    unshare = ["unshare", "--mount", "sh", "-c", FAR_NODE, "sh", str(tmp_path), nodes.address]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    far = psutil.Popen(unshare, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield nodes.address
    finally:
        if ray.is_initialized():
            ray.shutdown()
        below = far.children(recursive=True)
        far.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            far.wait(LIMIT_S)
        for process in [*below, far]:
            with suppress(psutil.Error):
                process.kill()
        nodes.shutdown()  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_a_run_on_nodes_without_a_common_file_system_has_the_bytes_of_a_local_one(
    far_cluster: str, small_run: TrainConfig, tmp_path: Path
) -> None:
    model = shutil.copytree(embedded_folder(), tmp_path / "model")
    run = replace(
        small_run,
        env="TextGame-v0",
        env_kwargs={"level": 1},
        model=str(model),
        steps=3,
        tasks=2,
        group_size=4,
        learner=replace(small_run.learner, shares=2),
        checkpoint=CheckpointConfig(every=1),
    )
    Trainer(run, tmp_path / "local").fit()
    cluster = ClusterConfig(address=far_cluster, learners=2, engines=2, workers=2, cpus={"learner": 0.8, "engine": 0.8})
    spread = replace(run, executor="ray", ray=cluster, steps=1)
    Trainer(spread, tmp_path / "ray").fit()
    Trainer.load(tmp_path / "ray", steps=3).fit()
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("local", "ray")
    ]
    assert losses[0] == losses[1]
    copies = list(Path(tempfile.gettempdir()).glob("agentgym-files-*/*"))
    assert any((copy / "model.safetensors").exists() for copy in copies), "the far node has fetched the model"
    checkpoint = tmp_path / "ray" / "checkpoints" / "step-000003" / "learner"
    assert {file.name[:4] for file in checkpoint.glob("*.distcp")} == {"__0_", "__1_"}
