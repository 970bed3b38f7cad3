"""A run that is killed goes on, when it is resumed, as if nothing had been: the same bits, wherever it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.rollout.record.chain import CHAIN
from agentgym.trainers.checkpoints.checkpoint import checkpoint_folders
from agentgym.trainers.speed.step_speed import OF_THE_MACHINE

ROOT = Path(__file__).parent.parent.parent
RUN = """
import os, shutil, signal, sys, time
from dataclasses import replace

from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.observer import Unobserved
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.loop.trainer import Trainer

folder, place, resume = sys.argv[1:]


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class Watcher(Unobserved):
    def on_step(self, metrics):
        if metrics.step != 2 or place == "nowhere":
            return
        while not os.path.exists(f"{folder}/checkpoints/best"):  # the checkpoint of step 1 is done with
            time.sleep(0.01)
        if place == "recorded":
            kill()
        if place == "files":  # the tokenizer is copied between the model and the learner's state
            shutil.copyfile = kill
        if place == "rename":
            os.replace = kill
        if place == "best":  # the checkpoint has its name, and `best` is next
            rename = os.replace
            os.replace = lambda one, two: (kill if str(two).endswith("best") else rename)(one, two)


config = TrainConfig(
    env="TextGame-v0", env_kwargs={"level": 1}, steps=3, tasks=2, group_size=2, eval=HeldOutConfig(episodes=0),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    checkpoint=CheckpointConfig(every=1, keep=2),
)
config = replace(config, limits=replace(config.limits, max_turns=4))
Trainer(config, folder, Watcher(), resume=resume == "resume").fit()
"""


def run(folder: Path, place: str = "nowhere", *, resume: bool = False) -> int:
    args = [sys.executable, "-c", RUN, str(folder), place, "resume" if resume else "begin"]
    return subprocess.run(args, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode


def untimed(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line[name] for name in line if not name.endswith("_s") and name not in (CHAIN, *OF_THE_MACHINE)}
        for line in lines
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("kill") / "whole"
    assert run(folder) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "checkpoints"),
    [
        ("files", [1]),  # in the thread, when half of the files are written
        ("rename", [1]),  # when all of them are, and the folder has not its name yet
        ("best", [1, 2]),
        ("recorded", [1]),  # between a step's line of metrics and its checkpoint
    ],
)
def test_a_run_killed_at_a_known_place_goes_on_bitwise(
    place: str, checkpoints: list[int], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run(folder, place) == -signal.SIGKILL
    assert [int(path.name[5:]) for path in checkpoint_folders(folder)] == checkpoints
    assert run(folder, resume=True) == 0
    assert (folder / "episodes.jsonl.zst").read_bytes() == (whole / "episodes.jsonl.zst").read_bytes()
    assert untimed(folder) == untimed(whole)
    names = [path.name for path in checkpoint_folders(whole)]
    assert names == [path.name for path in checkpoint_folders(folder)] == ["step-000002", "step-000003"]
    for name in names:
        for file in ("model.safetensors", "state.json", "learner/__0_0.distcp", "learner/structure.json"):
            pair = [(run_folder / "checkpoints" / name / file).read_bytes() for run_folder in (whole, folder)]
            assert pair[0] == pair[1], f"{name}/{file}"
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_goes_on_bitwise() -> None:
    """Three kills; `python benchmarks/kills.py` makes twenty."""
    args = [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--kills", "3"]
    done = subprocess.run(
        args, capture_output=True, text=True, timeout=1200, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and "bitwise equal" in done.stdout, done.stdout + done.stderr
