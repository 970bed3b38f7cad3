"""Environments of the verifiers library, played in an interpreter of their own: it wants older packages than ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.adapter
PROJECT = Path(__file__).with_name("verifiers_project")
PLAYED = Path(__file__).with_name("verifiers_played.py")


def test_environments_of_verifiers_are_played_evaluated_and_trained(verifiers_python: Path) -> None:
    command = [verifiers_python, "-m", "pytest", "-q", "-n", "0", "-m", "adapter", PLAYED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_a_project_is_trained_on_as_it_is(verifiers_python: Path, tmp_path: Path) -> None:
    shutil.copytree(PROJECT, tmp_path, dirs_exist_ok=True)
    run = ["train", "--env", "verifiers/letters.py", "--env-kwargs", "num_examples=4", "--steps", "1", "--json"]
    sizes = ["--tasks", "2", "--group-size", "4", "--eval.episodes", "0", "--limits.turn-tokens", "64"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [verifiers_python, "-m", "agentgym", *run, *sizes, "--output", "run"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert step["failed"] == 0 and step["dead_groups"] == 0 and step["grad_norm"] > 0
