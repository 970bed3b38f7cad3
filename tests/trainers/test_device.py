"""A run on a device beside the CPU: nothing of it stays on the CPU by mistake, and its numbers are the CPU's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.cli.options import parse_options
from agentgym.embedded import embedded_folder
from agentgym.engines.server_kind import SERVERS
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.errors import ConfigError
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.parts import engine as parts
from agentgym.trainers.settings.learner import LearnerConfig

PROGRAM = Path(__file__).parent / "device_process.py"


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices that are written in Python",
)
@pytest.mark.slow
def test_a_run_on_another_device_gives_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    begun = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(tmp_path), device], stdout=subprocess.PIPE, text=True)
        for device in ("cpu", "pretend")
    ]
    outputs = [process.communicate()[0] for process in begun]
    assert [process.returncode for process in begun] == [0, 0]
    cpu, pretended = (json.loads(output.splitlines()[-1]) for output in outputs)
    learned = {case: [step["grad_norm"] > 0 for step in steps] for case, steps in pretended.items()}
    steps = {"regularized": 2, "critic": 2, "sequences": 1, "bfloat16": 1, "micro-batches": 1, "sft": 2, "dpo": 2}
    assert learned == {case: [True] * number for case, number in steps.items()}
    assert [step["waits"] for step in pretended["micro-batches"]] == [2], (
        "for the gradient's norm and for the statistics"
    )
    cores = {case: [step["cores"] for step in steps] for case, steps in pretended.items()}
    assert cores == {case: [1] * number for case, number in steps.items()}, "threads of an operator wait for each other"
    assert [step["cores"] for step in cpu["critic"]] == [1, 1]
    del cpu["bfloat16"]  # there rounding may turn the choice of a token, and all that follows
    for case, steps in cpu.items():
        for here, there in zip(steps, pretended[case], strict=True):
            assert seen(there) == pytest.approx(seen(here), rel=1e-4, abs=1e-6), case


def seen(step: dict[str, Any]) -> dict[str, float]:
    names = ("tokens", "reward_mean", "loss", "grad_norm", "entropy", "value_loss", "correction_mean")
    return {name: step[name] for name in names if step.get(name) is not None}


def test_a_device_that_is_not_there_is_named_before_the_run_has_a_folder(tmp_path: Path) -> None:
    config = TrainConfig(env="TextGame-v0", learner=LearnerConfig(device="cuda:99"))
    with pytest.raises(ConfigError, match=r"device 'cuda:99' cannot be used"):
        Trainer(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_device_of_a_cluster_is_not_that_of_one_process() -> None:
    with pytest.raises(ConfigError, match=r"on a cluster give ray\.gpus_per_learner"):
        TrainConfig(env="TextGame-v0", executor="ray", learner=LearnerConfig(device="cuda"))


@pytest.mark.long
def test_a_gpu_learns_in_bfloat16_unless_another_type_is_given() -> None:
    def chosen(*args: str) -> str:
        run = parse_options(TrainConfig, ["--env", "TextGame-v0", *args], prog="agentgym train")
        return run.learner.compute_dtype

    assert chosen() == chosen("--learner.device", "cpu") == "float32"
    assert chosen("--learner.device", "cuda") == chosen("--learner.device", "cuda:1") == "bfloat16"
    assert chosen("--learner.device", "cuda", "--learner.dtype", "float32") == "float32"
    assert LearnerConfig(device="cuda").compute_dtype == "bfloat16"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("learned", "dtype", "served"),
    [("float32", "auto", "float32"), ("bfloat16", "auto", "bfloat16"), ("bfloat16", "float16", "float16")],
)
def test_a_server_is_launched_in_the_type_of_the_learner_unless_it_has_another(
    engine: str, learned: Any, dtype: str, served: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched: list[str] = []

    async def open_server(settings: ServerConfig, *_: object, **__: object) -> Any:
        launched.append(settings.weights_dtype)

    monkeypatch.setattr(parts, "SERVERS", {engine: replace(SERVERS[engine], open=open_server)})
    server, learner = ServerConfig(dtype=dtype), LearnerConfig(dtype=learned)
    config = TrainConfig(env="TextGame-v0", engine=engine, learner=learner, server=server)
    asyncio.run(parts.open_servers(config, embedded_folder(), version=0, log_folder=tmp_path))
    assert launched == [served]
