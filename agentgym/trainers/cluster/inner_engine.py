"""The engines inside engine actors: a model in the actor's process, or a server that it owns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Completion, Engine, Sampling, WeightSync
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.weights.buckets import fused_digests, overall_digest
from agentgym.model.model_folder import on_device, published_views
from agentgym.model.policy import load_policy
from agentgym.trainers.cluster.node_files import ONE_NODE, NodeFiles
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.parts.engine import local_settings, open_servers

__all__ = ["InnerEngine", "Part", "open_inner"]

POLL_S = 0.5
Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """The arguments that an engine actor is started with."""

    config: TrainConfig
    number: int
    """The index of the engine."""
    folder: str
    """The folder of the model and its weights."""
    logs: str
    """The folder for the servers' logs, on the actor's node."""
    version: int
    """The policy version of the folder's weights."""
    files: NodeFiles = ONE_NODE


class InnerEngine(Protocol):
    """One engine, with the operations that an actor needs besides those of every engine."""

    @property
    def engine(self) -> Engine:
        """The engine that samples."""

    @property
    def dtype(self) -> str:
        """The dtype of its weights."""

    async def take(self, weights: Tensors, version: int, *, is_paused: bool) -> tuple[WeightSync, dict[str, str]]:
        """Updates the weights and returns digests for the caller to compare; empty if they were compared already.

        If the engine was not paused, it is paused no longer than necessary.
        """

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Samples one reply."""

    async def prepare(self) -> None:
        """Does now what the first request would otherwise wait for."""

    async def release_memory(self) -> None:
        """Releases as much memory as it can until the next update, for a colocated learner; the engine is paused."""

    async def is_alive(self) -> bool:
        """True if it can answer."""

    async def end(self) -> str:
        """Waits until the engine ends by itself, and returns a description of its end."""


async def open_inner(part: Part) -> InnerEngine:
    """Opens the engine: loads the model, or starts a server and waits until it answers."""
    config = part.config
    if config.engine == "local":
        return _InnerLocal(part)
    servers = config.server
    urls = servers.urls[part.number : part.number + 1]
    device = servers.device if servers.device != "auto" or config.ray.gpus_per_engine else "cpu"
    logs = servers.log_folder or part.logs
    own = replace(servers, urls=urls, device=device, log_folder=str(Path(logs) / f"engine-{part.number}"))
    if config.ray.layout == "colocated":
        own = replace(own, serving=replace(own.serving, sleep=True))
    mine = replace(config, executor="local", server=own)
    engine = await open_servers(mine, Path(part.folder), version=part.version, log_folder=Path(logs))
    return _InnerServer(engine)


class _InnerLocal:
    """The model in this process, on its GPU and in the learner's type if it has one."""

    def __init__(self, part: Part) -> None:
        config, on_gpu = part.config, bool(part.config.ray.gpus_per_engine)
        self.dtype = config.learner.compute_dtype if on_gpu else "float32"
        model = load_policy(part.folder, dtype=getattr(torch, self.dtype), backend=config.model_backend)
        self._model = on_device(model, "cuda" if on_gpu else "cpu")
        self.engine = LocalEngine(self._model, local_settings(config, self._model), version=part.version)
        self._folder = part.folder

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        sampling = replace(sampling, decode=self._tokenizer.decode) if sampling.stop else sampling
        return await self.engine.generate(prompt_ids, sampling, session=session)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        """The tokenizer that finds stop strings."""
        return ChatTokenizer.load(self._folder, needs_template=False)

    async def take(self, weights: Tensors, version: int, *, is_paused: bool) -> tuple[WeightSync, dict[str, str]]:
        sync = await self.engine.update_weights(weights, version)
        if self.dtype == "float32":
            digests = fused_digests({name: view.detach() for name, view in published_views(self._model)})
        else:  # what is sampled with is rounded
            digests = fused_digests(weights)
        return replace(sync, checksum=overall_digest(digests)), digests

    async def prepare(self) -> None:
        if self.engine.compiles:
            await self.engine.prepare()

    async def release_memory(self) -> None:
        await self.engine.release_memory()

    async def is_alive(self) -> bool:
        return True

    async def end(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("it ends with its process")


class _InnerServer:
    """One server, which itself compares the weights that it received."""

    def __init__(self, engine: ReplicatedEngine) -> None:
        self.engine = engine
        (self._replica,) = engine.replicas
        self.dtype = engine.dtype

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        return await self.engine.generate(prompt_ids, sampling, session=session)

    async def take(self, weights: Tensors, version: int, *, is_paused: bool) -> tuple[WeightSync, dict[str, str]]:
        await self.engine.revive()
        if is_paused:
            return await self.engine.update_weights(weights, version), {}
        await self.engine.pause()
        try:
            return await self.engine.update_weights(weights, version), {}
        finally:
            await self.engine.resume()

    async def prepare(self) -> None:
        pass

    async def release_memory(self) -> None:
        """Does nothing: a server that sleeps has released it in its pause."""

    async def is_alive(self) -> bool:
        return bool(self.engine.router.alive) and await self._replica.is_alive()

    async def end(self) -> str:
        while not (dead := [process for process in self.engine.processes if not process.alive]):
            await asyncio.sleep(POLL_S)
        command = dead[0].command
        return f"the {command.name} server ended; its log is {command.log}"
