"""An in-process engine in a process of its own, and what stands for it elsewhere."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from agentgym.engines.hf import HfEngine, HfEngineConfig
from agentgym.engines.hf_checkpoint import hf_named_views, load_decoder
from agentgym.engines.hf_weights import fused_digests, overall_digest
from agentgym.engines.http import HttpUnreachable
from agentgym.engines.protocol import Completion, LoraWeights, Sampling, Weights, WeightSync
from agentgym.engines.replicated import ReplicatedEngine, ServingSettings
from agentgym.engines.weight_check import WeightCheck
from agentgym.errors import EngineError
from agentgym.trainers.cluster.actors import Actor, ActorLost, Parcel
from agentgym.trainers.cluster.board import Posted, report_warnings

__all__ = ["ClusterEngine", "EngineActor"]


class EngineActor:
    """An `HfEngine` over a model of its own; one that was begun anew takes the newest weights before it answers."""

    def __init__(self, label: str, folder: str, config: HfEngineConfig, version: int, board: Actor) -> None:
        report_warnings(label, board)
        self.model = load_decoder(folder)
        self.engine = HfEngine(self.model, config, version=version)
        self._views = dict(hf_named_views(self.model))
        self._board = board
        self._ready: asyncio.Task[None] | None = None

    async def identity(self) -> tuple[int, int, int]:
        """Vocabulary, context window and process id."""
        return self.engine.vocab_size, self.engine.context_window, os.getpid()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """See `Engine.generate`."""
        await self._begun()
        return await self.engine.generate(prompt_ids, sampling, session=session)

    async def abort(self, session: str) -> None:
        """See `Engine.abort`."""
        await self.engine.abort(session)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._begun()
        await self.engine.pause()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self.engine.resume()

    async def prepare(self) -> None:
        """Compiles now what the first request would wait for."""
        await self._begun()
        if self.engine.compiles:
            await self.engine.prepare()

    async def update(self, parcel: Parcel, version: int) -> tuple[WeightSync, dict[str, str]]:
        """Takes over the weights of a parcel, and gives the digests of what it then has; the engine is paused."""
        await self._begun()
        return await self._take(parcel, version)

    async def _begun(self) -> None:
        if self._ready is None:
            self._ready = asyncio.ensure_future(self._catch_up())
        await asyncio.shield(self._ready)

    async def _catch_up(self) -> None:
        posted: Posted | None = await self._board.call("newest")
        if posted is not None:
            await self._take(posted.weights, posted.version)

    async def _take(self, parcel: Parcel, version: int) -> tuple[WeightSync, dict[str, str]]:
        started = time.perf_counter()
        tensors: Mapping[str, Tensor] = await parcel.open()
        received = time.perf_counter()
        await self.engine.update_weights(tensors, version)
        digests = fused_digests({name: view.detach() for name, view in self._views.items()})
        sync = WeightSync(
            version=version,
            checksum=overall_digest(digests),
            num_tensors=len(tensors),
            num_bytes=sum(one.nbytes for one in tensors.values()),
            transfer_s=received - started,
            load_s=time.perf_counter() - received,
        )
        return sync, digests


@dataclass(frozen=True, eq=False)
class Shipment:
    """Weights on their way to all engines."""

    version: int
    weights: Parcel
    digests: Mapping[str, str]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], version: int) -> Shipment:
        """Stores the weights in the cluster."""
        tensors = {name: tensor.detach().cpu() for name, tensor in weights.items()}
        return cls(version, Parcel.of(tensors), fused_digests(tensors))


class ActorReplica:
    """A `Replica` that is an `EngineActor`."""

    dtype = "float32"

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.shipment: Shipment | None = None
        """What the next update brings."""
        self._check = WeightCheck(actor.label, is_exact=True)

    @property
    def name(self) -> str:
        """The engine in messages."""
        return self.actor.label

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, version: int) -> Completion:
        """Samples one reply; the part of `rid` before its last # is the session."""
        completion: Completion = await self._call("generate", prompt_ids, sampling, rid.rpartition("#")[0])
        return completion

    async def abort(self, rid: str | None) -> None:
        """Ends the request of a session."""
        if rid is not None:
            await self._call("abort", rid.rpartition("#")[0])

    async def is_alive(self) -> bool:
        """Whether the actor answers, an actor that was begun anew included."""
        try:
            async with asyncio.timeout(5.0):
                await self._call("identity")
        except (HttpUnreachable, TimeoutError):
            return False
        return True

    async def pause(self) -> None:
        """Stops sampling at a token boundary."""
        await self._call("pause")

    async def resume(self) -> None:
        """Goes on."""
        await self._call("resume")

    async def flush(self) -> None:
        """Nothing to do: an update empties the cache."""

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Has the actor fetch the shipment that was made of the weights, and compares what arrived."""
        shipment = self.shipment
        if shipment is None or shipment.version != version:
            raise EngineError(f"no shipment of version {version} was made for {self.name}")
        answer: tuple[WeightSync, dict[str, str]] = await self._call("update", shipment.weights, version)
        sync, digests = answer
        self._check.compare(shipment.digests, digests, version)
        return sync

    async def close(self) -> None:
        """Nothing to do: the cluster ends its actors."""

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self.actor.call(method, *arguments)
        except ActorLost as error:
            raise HttpUnreachable(str(error)) from error


class ClusterEngine(ReplicatedEngine):
    """The engines of a run, behind the driver or a worker; `board` is where an engine begun anew finds the weights."""

    takes_grammar = False

    def __init__(self, actors: Sequence[Actor], board: Actor, *, size: tuple[int, int], version: int) -> None:
        replicas = [ActorReplica(actor) for actor in actors]
        vocab_size, window = size
        super().__init__(replicas, ServingSettings(), vocab_size=vocab_size, context_window=window, version=version)
        self._board = board

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Stores the weights in the cluster once, for all engines and for those that are begun anew."""
        if isinstance(weights, LoraWeights):
            raise EngineError("the in-process engine takes no adapter alone")
        started = time.perf_counter()
        shipment = Shipment.of(cast("Mapping[str, Tensor]", weights), version)
        gather_s = time.perf_counter() - started
        await self._board.call("post", Posted(version, shipment.weights))
        for replica in self.replicas:
            cast(ActorReplica, replica).shipment = shipment
        sync = await super().update_weights(weights, version)
        return replace(sync, gather_s=gather_s)
