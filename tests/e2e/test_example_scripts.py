"""The examples that are loops or commands, each run at a small size."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agentgym.cli.main import main
from agentgym.trainers import LOSSES

FOLDER = Path(__file__).parents[2] / "examples"
SMALL = "--tasks 2 --group-size 2 --eval.episodes 4".split()
SOFT_CLIP = f"{FOLDER / 'own_loss.py'}:soft_clip"


def run_script(name: str, folder: Path, *options: str, **variables: str) -> str:
    """Runs a script of the examples in a folder, and returns its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FOLDER": "run", **variables}
    done = subprocess.run(
        [FOLDER / name, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_loop_over_public_names_learns_text_games() -> None:
    loop = importlib.import_module("examples.minimal_loop")
    before, after = loop.main(loop.Settings(steps=8, held_out=100))
    assert before + 0.1 < after


@pytest.mark.slow
def test_a_run_begins_with_the_model_that_imitated(tmp_path: Path) -> None:
    run_script("sft_then_rl.sh", tmp_path, *SMALL, SFT_STEPS="2", STEPS="1")
    config = yaml.safe_load((tmp_path / "run/rl/config.yaml").read_text(encoding="utf-8"))
    assert (config["model"], config["steps"]) == ("run/sft", 1)
    assert len((tmp_path / "run/rl/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.slow
def test_a_player_of_both_seats_is_evaluated_in_the_end(tmp_path: Path) -> None:
    run_script("self_play.sh", tmp_path, *SMALL, SFT_STEPS="2", STEPS="1", NUM_GAMES="4")
    config = yaml.safe_load((tmp_path / "run/self/config.yaml").read_text(encoding="utf-8"))
    assert config["env_kwargs"] == {"words": True, "opponent": "self", "opening": [4, 6]}
    assert (tmp_path / "run/model/config.json").exists() and (tmp_path / "run/eval").is_dir()


@pytest.mark.slow
def test_a_model_behind_an_endpoint_is_evaluated(chat_endpoint: Callable[..., Any], tmp_path: Path) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="72"))  # type: ignore[attr-defined]
    printed = run_script("eval_endpoint.sh", tmp_path, URL=f"{endpoint.url}/v1", NUM_TASKS="2")
    assert "requests" in printed and len(endpoint.bodies) >= 2


@pytest.mark.slow
def test_the_run_on_one_gpu_is_planned(tmp_path: Path) -> None:
    printed = run_script("one_gpu.sh", tmp_path, "--dry-run", MODEL="embedded", DEVICE="cpu")
    assert "12,800" in printed and "adapters of rank 32" in printed
    assert not (tmp_path / "runs").exists()


def test_a_loss_of_ones_own_has_the_slope_of_the_policy_gradient_at_a_ratio_of_1() -> None:
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    old_logp = torch.tensor([-1.0, -3.0])
    policy = LOSSES[SOFT_CLIP](logp, old_logp, torch.tensor([2.0, 2.0]), torch.ones(2, dtype=torch.bool))
    (slope,) = torch.autograd.grad(policy.loss.sum(), logp)
    assert slope[0].item() == pytest.approx(-2.0) and abs(slope[1].item()) < 1e-6
    assert policy.stats.clip_fraction == 0.5


@pytest.mark.slow
def test_a_loss_of_ones_own_trains(tmp_path: Path) -> None:
    options = "--env TextGame-v0 --steps 1 --tasks 4 --group-size 4 --eval.episodes 4".split()
    assert main(["train", *options, "--learner.loss", SOFT_CLIP, "--output", str(tmp_path / "run")]) == 0
    (step,) = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(step)["clip_fraction"] == 0.0
