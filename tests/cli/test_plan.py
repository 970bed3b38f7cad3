"""`agentgym plan`: what it shows, what it refuses, and what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


def test_a_plan_shows_memory_splits_and_what_is_assumed(agentgym: Command) -> None:
    done = agentgym(*"plan --model 8B --gpus 8 --max-staleness 1 --json".split())
    assert done.code == 0
    for told in ("8,190,735,360 parameters", "8 x H100", "learner: optimizer", "who waits", "assumed: train_mfu 0.4"):
        assert told in done.text
    found = done.json
    assert found["fits"] and found["parameters"] == 8_190_735_360
    assert found["learner_gpus"] + found["engines"] * found["engine_gpus"] <= 8 or found["layout"] == "colocated"
    assert sum(found["learner_memory_gib"].values()) == pytest.approx(found["learner_total_gib"], abs=0.01)
    assert found["step_s"] > 0


def test_what_does_not_fit_ends_with_what_would(agentgym: Command) -> None:
    done = agentgym(*"plan --model 32B --gpus 1 --gpu h200 --json".split())
    assert done.code == 1
    assert "error: the learner does not fit on 1 GPU" in done.err and "; or --gpus " in done.err
    assert not done.json["fits"]
    offered = done.json["would_fit"][0].split()
    assert agentgym("plan", "--model", "32B", "--gpu", "h200", *offered).code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model 33B", "did you mean '32B'"),
        ("", "missing --model"),
        ("--model 8B --gpu h300", "no figures of a GPU 'h300'"),
        ("--model 8B --gpu.memory 80", "did you mean '--gpu.memory-gib'"),
        ("--model 8B --rates.train-mfu -1", "rates.train_mfu must be at least 0"),
        ("--model 8B --measured nowhere.json", "holds no measured figures"),
        ("--model 8B --gpus 0", "gpus must be at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(options: str, said: str, agentgym: Command) -> None:
    done = agentgym("plan", *options.split())
    assert done.code == 2
    assert said in done.err


@pytest.mark.slow
def test_figures_are_measured_and_planned_with(agentgym: Command, tmp_path: Path) -> None:
    file = str(tmp_path / "cpu.json")
    measuring = "--measuring.context 16 --measuring.batches 1 4 --measuring.compile False --measuring.device cpu"
    done = agentgym("plan", "--model", "embedded", "--measure", file, *measuring.split())
    assert done.code == 0
    assert "GFLOP/s" in done.text and f"--measured {file}" in done.text
    planned = agentgym(
        "plan", "--model", "embedded", "--gpus", "1", "--learner.precision", "float32", "--measured", file, "--json"
    )
    assert planned.code == 0
    assert f"measured ({file})" in planned.text
    assert planned.json["gpu"].startswith("CPU")
    assert "train_mfu" not in planned.json["assumed"]
    assert planned.json["rates"]["train_mfu"] > 0


def test_a_plan_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from agentgym.cli.main import main\n"
        "code = main(['plan', '--model', '0.6B', '--gpus', '1', '--json'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["parameters"] == 596_049_920
