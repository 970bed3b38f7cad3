"""A server that a run launches onto the learner's GPU leaves memory to the learner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym.trainers.parts.engine as module
from agentgym.embedded import embedded_folder
from agentgym.engines.sglang.engine import SglangConfig, sglang_command
from agentgym.engines.vllm.engine import VllmConfig, vllm_command
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.settings.learner import LearnerConfig

SHARED = TrainConfig(env="TextGame-v0", engine="sglang", learner=LearnerConfig(device="cuda"))
SGLANG, VLLM = SglangConfig(device="cuda"), VllmConfig(device="cuda")


def command_of(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the command of the server that a run would launch."""
    opened: list[Any] = []

    async def remember(settings: Any, *_: object, **__: object) -> None:
        opened.append(settings)

    monkeypatch.setattr(module, "open_sglang", remember)
    monkeypatch.setattr(module, "open_vllm", remember)
    asyncio.run(module.open_servers(config, embedded_folder(), version=0, log_folder=Path("logs")))
    command = sglang_command if config.engine == "sglang" else vllm_command
    return command(opened[0], embedded_folder(), 1)


def test_a_server_on_the_learners_gpu_takes_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words = command_of(replace(SHARED, sglang=SGLANG), monkeypatch)
    assert "--mem-fraction-static=0.4" in words and words[words.index("--dtype") + 1] == "bfloat16"
    assert "--gpu-memory-utilization=0.4" in command_of(replace(SHARED, engine="vllm", vllm=VLLM), monkeypatch)


def test_what_is_asked_for_comes_last_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(SGLANG, server_args=("--mem-fraction-static=0.6",))
    assert command_of(replace(SHARED, sglang=own), monkeypatch)[-1] == "--mem-fraction-static=0.6"


@pytest.mark.parametrize(
    "config",
    [
        replace(SHARED, sglang=SGLANG, learner=LearnerConfig()),
        replace(SHARED, sglang=replace(SGLANG, device="cpu")),
        replace(SHARED, sglang=replace(SGLANG, replicas=2)),
    ],
)
def test_a_server_with_a_device_of_its_own_has_its_own_default(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--mem-fraction-static=0.4" not in command_of(config, monkeypatch)
