"""The engine actors of a run as a single engine, for the driver and for each worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, TypeVar, cast

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.servers.http import HttpUnreachable
from agentgym.engines.servers.replicated import Replica, ReplicatedEngine
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.engines.weights.check import WeightCheck
from agentgym.errors import EngineError
from agentgym.model.published_weights import Weights
from agentgym.trainers.cluster.actors import Actor, ActorLost, ParcelLost
from agentgym.trainers.cluster.board import BoardKeeper, Posted
from agentgym.trainers.cluster.engine_actor import EngineActor, EngineFacts
from agentgym.trainers.cluster.shipment import Shipment
from agentgym.trainers.parts.parts import LearnerLost

__all__ = ["ClusterEngine", "Engines"]

READY_S = 5.0
"""The seconds within which a live engine reports that it is ready."""
POLL_S = 0.5
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Engines:
    """The engine actors of a run and their common facts."""

    actors: Sequence[Actor[EngineActor]]
    facts: EngineFacts
    """The facts that hold for all of them."""
    patience_s: float
    """The seconds that a request waits while all of them restart."""


class ActorReplica:
    """A `Replica` that is an `EngineActor`."""

    def __init__(self, actor: Actor[EngineActor], dtype: str) -> None:
        self.actor = actor
        self.dtype = dtype
        self.posted: Posted | None = None
        """The weights of the next update."""
        self._check = WeightCheck(actor.label, is_exact=True)

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return self.actor.label

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, version: int) -> Completion:
        """Samples one reply; the actor decodes with a tokenizer of its own."""
        plain_sampling = replace(sampling, decode=None)
        return await self._call(EngineActor.generate, prompt_ids, plain_sampling, process_session(rid))

    async def abort(self, rid: str | None) -> None:
        """Aborts the request of a session."""
        if rid is not None:
            await self._call(EngineActor.abort, process_session(rid))

    async def is_alive(self) -> bool:
        """True if the actor answers, also after a restart."""
        try:
            async with asyncio.timeout(READY_S):
                return await self._call(EngineActor.is_ready)
        except (HttpUnreachable, TimeoutError):
            return False

    async def pause(self) -> None:
        """Stops sampling at a token boundary."""
        await self._call(EngineActor.pause)

    async def resume(self) -> None:
        """Resumes sampling."""
        await self._call(EngineActor.resume)

    async def flush(self) -> None:
        """Empties the prefix cache."""
        await self._call(EngineActor.flush)

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Makes the actor take the newest shipment, and compares the digests of what arrived."""
        posted = self.posted
        if posted is None or posted.version != version:
            raise EngineError(f"no shipment of version {version} was made for {self.name}")
        sync, digests = await self._call(EngineActor.update, posted)
        if digests:
            self._check.compare(posted.shipment.digests, digests, version)
        return sync

    async def close(self) -> None:
        """Does nothing: the cluster ends its actors."""

    async def _call(
        self, method: Callable[Concatenate[EngineActor, P], Awaitable[T]], *arguments: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await self.actor.call(method, *arguments, **kwargs)
        except ActorLost as error:
            raise HttpUnreachable(str(error)) from error


def process_session(rid: str) -> str:
    """Returns the session of a request under a name that is unique to one process.

    An episode that another worker played before it died may still have a request in flight.
    """
    return rid.rpartition(".")[0]


class ClusterEngine(ReplicatedEngine):
    """The engines of a run, as the driver or a worker uses them. If all are dead, it waits until one restarts.

    The driver passes the `keeper` of the board, from which a restarted engine takes the newest weights.
    """

    takes_grammar = False
    updates_running = True

    def __init__(self, engines: Engines, keeper: BoardKeeper | None = None, *, version: int = 0) -> None:
        facts = engines.facts
        replicas = [ActorReplica(actor, facts.dtype) for actor in engines.actors]
        limits = {"vocab_size": facts.vocab_size, "context_window": facts.context_window}
        super().__init__(replicas, ServingSettings(), version=version, **limits)
        self._actors = tuple(engines.actors)
        self._patience_s = engines.patience_s
        self._keeper = keeper
        self._search: asyncio.Task[None] | None = None

    def _check_versions(self, completion: Completion, name: str) -> None:
        """Does nothing: each engine checks its own, and a worker does not know which weights are the newest."""

    async def take_shipment(self, shipment: Shipment, version: int) -> WeightSync:
        """Has all engines take the weights of a shipment, and those that restart later.

        Raises LearnerLost if the rank that shipped them died meanwhile.
        """
        assert self._keeper is not None
        posted = Posted(version, shipment)
        await self._keeper.post(posted)
        for replica in cast("tuple[ActorReplica, ...]", self.replicas):
            replica.posted = posted
        try:
            sync = await self.update_weights({}, version)
        except ParcelLost as error:
            raise LearnerLost(f"weights of version {version} did not arrive: {error}") from error
        for index in set(range(len(self.replicas))) - set(self.router.alive):
            self._actors[index].tell(EngineActor.catch_up)  # it may be alive and have answered too late
        return replace(sync, gather_s=sync.gather_s + shipment.gather_s)

    async def abort(self, session: str) -> None:
        """Aborts the session's request in flight, and makes the engines forget the session."""
        await super().abort(session)
        for index in self.router.alive:
            self._actors[index].tell(EngineActor.abort, f"{session}#{self._mark}"[:-1])

    def look_for_dead(self) -> None:
        """Checks in the background whether dead engines are back."""
        if len(self.router.alive) < len(self.replicas):
            self._search_task()

    def _search_task(self) -> asyncio.Task[None]:
        if self._search is None or self._search.done():
            self._search = asyncio.ensure_future(self.revive())
        return self._search

    async def _acquire(self, session: str) -> int:
        await self._until_alive()
        return await super()._acquire(session)

    async def _command_all(self, order: Callable[[Replica], Awaitable[T]]) -> list[T]:
        while True:
            await self._until_alive()
            is_hopeless = not self.router.alive
            try:
                return await super()._command_all(order)
            except EngineError:
                if is_hopeless or self.router.alive or self._closed:
                    raise

    async def _until_alive(self) -> None:
        """Waits while all engines are dead, for as long as one may come back."""
        ends = time.monotonic() + self._patience_s
        while not self.router.alive and not self._closed and time.monotonic() < ends:
            await asyncio.wait({self._search_task()})
            if not self.router.alive:
                await asyncio.sleep(POLL_S)
