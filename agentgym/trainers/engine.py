"""The engine that a training run samples with, and how new weights reach it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from agentgym.engines.hf import HfEngine
from agentgym.engines.hf_checkpoint import hf_named_views, load_decoder, on_device
from agentgym.engines.hf_model import Decoder
from agentgym.engines.protocol import Engine, Weights
from agentgym.engines.replicated import ReplicatedEngine
from agentgym.engines.sglang import open_sglang
from agentgym.engines.vllm import open_vllm
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner_config import LearnerConfig

__all__ = ["load_model", "open_engine", "open_servers", "weights_for"]


def load_model(folder: Path, learner: LearnerConfig) -> Decoder:
    """The model of a folder, where and in the type that a run learns with; raises ConfigError for a device that is not
    there."""
    return on_device(load_decoder(folder, dtype=getattr(torch, learner.dtype)), learner.device)


async def open_engine(
    config: TrainConfig, model: Decoder, model_folder: Path, *, version: int, log_folder: Path
) -> Engine:
    """The engine of a run. In process it samples from the model itself, or from a copy where it goes on while the
    model is trained. Servers load `model_folder` and keep their logs in `log_folder`; their weights are those of
    the folder until the first update."""
    if config.engine == "hf":
        sampled = copy.deepcopy(model).requires_grad_(False) if config.max_staleness else model
        return HfEngine(sampled, config.hf, version=version)
    return await open_servers(config, model_folder, version=version, log_folder=log_folder)


async def open_servers(config: TrainConfig, model_folder: Path, *, version: int, log_folder: Path) -> ReplicatedEngine:
    """The engine of a run that samples on servers."""
    if config.engine == "sglang":
        sglang = replace(config.sglang, log_folder=config.sglang.log_folder or str(log_folder))
        return await open_sglang(sglang, model_folder, version=version)
    vllm = replace(config.vllm, log_folder=config.vllm.log_folder or str(log_folder))
    return await open_vllm(vllm, model_folder, version=version)


def weights_for(engine: Engine, model: Decoder) -> Weights:
    """What `update_weights` of this engine takes: nothing where it samples from the model itself."""
    is_shared = isinstance(engine, HfEngine) and engine.model is model
    return {} if is_shared else dict(hf_named_views(model))
