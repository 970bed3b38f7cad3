"""The examples for SLURM and Kubernetes start runs whose options exist, and go on with them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from agentgym.cli.main import main
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.config import TrainConfig

EXAMPLES = Path(__file__).parents[3] / "examples" / "cluster"
STUB = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'
ANSWERS = {"scontrol": "echo gpu1; echo gpu2", "srun": '[[ "$*" == *hostname* ]] && echo 10.0.0.7; true'}


def settings_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> TrainConfig:
    """Returns the settings of a command `agentgym train`, with the embedded model in place of its own."""
    words[words.index("--model") + 1] = "embedded"
    assert main([*words[1:], "--print-config"]) == 0
    return config_from_mapping(TrainConfig, yaml.safe_load(capsys.readouterr().out))


def check(config: TrainConfig) -> None:
    assert (config.executor, config.ray.learners, config.ray.engines, config.ray.gpus_per_engine) == ("ray", 8, 8, 1)
    assert config.learner.activation_checkpointing and config.limits.context_window == 16_384


def test_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    shell, flag, script = shlex.split(job["spec"]["entrypoint"])
    assert (shell, flag) == ("sh", "-c")
    first, _, second = script.partition("fi;")
    assert "train --resume --output /shared/run" in first
    check(settings_of(shlex.split(second)[1:], capsys))
    pods = [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    assert all(pod["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == "/shared" for pod in pods)


def test_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("scontrol", "srun", "ray", "sleep", "agentgym"):
        (tmp_path / name).write_text(STUB + ANSWERS.get(name, "") + "\n")
        (tmp_path / name).chmod(0o755)
    calls, run = tmp_path / "calls", tmp_path / "run"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "CALLS": str(calls),
        "MODEL": "embedded",
        "RUN": str(run),
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }

    def submit() -> list[str]:
        command = ["bash", str(EXAMPLES / "slurm.sh")]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
        lines = calls.read_text().splitlines()
        calls.unlink()
        return lines

    lines = submit()
    assert any("--nodelist=gpu1 ray start --head --node-ip-address 10.0.0.7" in line for line in lines)
    assert any("--exclude=gpu1 ray start --address 10.0.0.7:6379" in line for line in lines)
    check(settings_of(shlex.split(next(line for line in lines if line.startswith("agentgym"))), capsys))
    token = tmp_path / ".ray" / "auth_token"
    assert len(token.read_text().strip()) == 64 and token.stat().st_mode & 0o077 == 0
    run.mkdir()
    (run / "config.yaml").touch()
    assert f"agentgym train --resume --output {run}" in submit()
