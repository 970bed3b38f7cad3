"""On a cluster's GPUs, learner and engines compute in one type, and no tensor of a GPU leaves its process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from agentgym.embedded import embedded_folder
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Sampling
from agentgym.engines.weights.buckets import fused_digests
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.cluster import inner_engine, rank_process
from agentgym.trainers.cluster.inner_engine import Part, open_inner
from agentgym.trainers.cluster.rank_actor import RankActor
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.learner import LearnerConfig

GPUS = ClusterConfig(learners=1, engines=1, gpus_per_learner=1, gpus_per_engine=1)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leaves models on the CPU, and returns the devices that they would have been moved to."""
    seen_devices: list[str] = []

    def keep(model: LanguageModel, device: str) -> LanguageModel:
        seen_devices.append(device)
        return model

    for module in (inner_engine, rank_process):
        monkeypatch.setattr(module, "on_device", keep)
    return seen_devices


@pytest.fixture
def gpu_run(small_run: TrainConfig) -> TrainConfig:
    return replace(small_run, executor="ray", ray=GPUS)


def test_learners_with_gpus_compute_in_bfloat16_unless_another_type_is_given(small_run: TrainConfig) -> None:
    def computed(cluster: ClusterConfig, dtype: Literal["auto", "float32"] = "auto") -> str:
        config = replace(small_run, executor="ray", ray=cluster, learner=replace(small_run.learner, dtype=dtype))
        return config.learner.compute_dtype

    assert computed(ClusterConfig()) == "float32"
    assert computed(GPUS) == "bfloat16"
    assert computed(GPUS, "float32") == "float32"
    assert LearnerConfig(device="cuda").compute_dtype == "bfloat16"


def test_an_engine_with_a_gpu_samples_on_it_in_the_learners_type(
    gpu_run: TrainConfig, devices: list[str], tmp_path: Path
) -> None:
    async def play() -> None:
        inner = await open_inner(
            Part(config=gpu_run, number=0, folder=str(embedded_folder()), logs=str(tmp_path), version=0)
        )
        assert isinstance(inner.engine, LocalEngine)
        assert (devices, inner.engine.model.embed.dtype) == (["cuda"], torch.bfloat16)
        weights = {name: tensor.clone() for name, tensor in published_views(load_decoder(embedded_folder()))}
        sync, digests = await inner.take(weights, 1, is_paused=False)
        assert sync.version == 1
        assert digests == fused_digests(weights)
        reply = await inner.engine.generate(range(5, 45), Sampling(max_tokens=4), session="a")
        assert reply.policy_versions == (1,) * 4
        await inner.engine.close()

    asyncio.run(play())


def test_one_learner_with_a_gpu_trains_in_bfloat16_and_returns_cpu_tensors(
    gpu_run: TrainConfig,
    devices: list[str],
    begin_rank: Callable[[TrainConfig, Path], RankActor],
    fresh_batch: Callable[..., TrainingBatch],
) -> None:
    rank = begin_rank(gpu_run, embedded_folder())
    assert devices[0] == "cuda"
    assert rank._learner.model.embed.dtype == torch.bfloat16
    batch, moved = fresh_batch(rank._learner.model), list[Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "cpu", lambda tensor: moved.append(tensor) or tensor)
        logp_M = rank.act_on(Learner.logprobs, batch)
    assert any(tensor is logp_M for tensor in moved)
