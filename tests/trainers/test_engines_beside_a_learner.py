"""An engine in the memory of a learner, in its process or as a server on its GPU, leaves it what it will take."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym.trainers.parts.engine as module
from agentgym.embedded import embedded_folder
from agentgym.engines.local import kv_cache
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.server_kind import SERVERS
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.sglang.engine import sglang_command
from agentgym.engines.vllm.engine import vllm_command
from agentgym.model.policy import load_policy
from agentgym.rollout.limits import Limits
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig

SHARED = TrainConfig(env="TextGame-v0", engine="sglang", learner=LearnerConfig(device="cuda"))
ON_GPU = ServerConfig(device="cuda")


def command_of(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the command of the server that a run would launch."""
    opened: list[Any] = []

    async def remember(settings: Any, *_: object, **__: object) -> Any:
        opened.append(settings)

    monkeypatch.setattr(module, "SERVERS", {config.engine: replace(SERVERS[config.engine], open=remember)})
    asyncio.run(module.open_servers(config, embedded_folder(), version=0, log_folder=Path("logs")))
    command = sglang_command if config.engine == "sglang" else vllm_command
    return command(opened[0], embedded_folder(), 1)


@pytest.mark.parametrize(("gpus", "replicas"), [("0", 1), ("3", 1), ("0,1", 2), ("GPU-a,GPU-b", 5)])
def test_a_server_on_the_learners_gpu_takes_a_share_of_its_memory(
    gpus: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    shared = replace(SHARED, server=replace(ON_GPU, replicas=replicas))
    words = command_of(shared, monkeypatch)
    assert "--mem-fraction-static=0.4" in words and words[words.index("--dtype") + 1] == "bfloat16"
    assert "--gpu-memory-utilization=0.4" in command_of(replace(shared, engine="vllm"), monkeypatch)


def test_a_server_of_several_gpus_may_take_the_learners_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    wide = replace(ON_GPU, server_args=("--tp-size", "2"))
    assert "--mem-fraction-static=0.4" in command_of(replace(SHARED, server=wide), monkeypatch)


def test_what_is_asked_for_comes_last_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    own = replace(ON_GPU, server_args=("--mem-fraction-static=0.6",))
    assert command_of(replace(SHARED, server=own), monkeypatch)[-1] == "--mem-fraction-static=0.6"


@pytest.mark.parametrize(
    "config",
    [
        replace(SHARED, server=ON_GPU, learner=LearnerConfig()),
        replace(SHARED, server=replace(ON_GPU, device="cpu")),
        replace(SHARED, server=replace(ON_GPU, replicas=2)),
        replace(SHARED, server=ON_GPU, learner=LearnerConfig(device="cuda:2")),
    ],
)
def test_a_server_with_a_device_of_its_own_has_its_own_default(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert "--mem-fraction-static=0.4" not in command_of(config, monkeypatch)


@pytest.mark.parametrize(("learner", "bytes_a_weight"), [
    (LearnerConfig(), 12),
    (LearnerConfig(kl=KLConfig(coefficient=0.1)), 16),
    (LearnerConfig(lora=LoraConfig(rank=8)), 4),
])  # fmt: skip
def test_the_engine_in_process_has_half_of_what_the_learner_leaves(
    learner: LearnerConfig, bytes_a_weight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_policy(embedded_folder())
    size = sum(parameter.numel() for parameter in model.parameters())
    slot_bytes = 4 * 1024 * sum(2 * shape.num_heads * shape.width for shape in model.kv_shapes)
    free = bytes_a_weight * size + 2 * 8 * slot_bytes + 100
    monkeypatch.setattr(kv_cache, "_free_memory", lambda _: free)
    config = TrainConfig(env="TextGame-v0", learner=learner, limits=Limits(context_window=1024))

    async def num_slots() -> int | None:
        engine = await module.open_engine(config, model, embedded_folder(), version=0, log_folder=Path("logs"))
        assert isinstance(engine, LocalEngine)
        await engine.close()
        return engine.config.num_slots

    assert asyncio.run(num_slots()) == 7, "of eight, one is scratch"
