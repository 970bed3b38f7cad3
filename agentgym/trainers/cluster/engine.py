"""The engine actors of a run as a single engine, for the driver and for each worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.servers.http import HttpUnreachable
from agentgym.engines.servers.replicated import Replica, ReplicatedEngine
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.engines.weights.check import WeightCheck
from agentgym.engines.weights.group_address import GroupAddress
from agentgym.errors import EngineError
from agentgym.model.published_weights import Weights
from agentgym.trainers.cluster.actors import Actor, ActorLost, ParcelLost
from agentgym.trainers.cluster.board import BoardKeeper, Posted
from agentgym.trainers.cluster.shipment import Seat, Shipment
from agentgym.trainers.parts.parts import LearnerLost

__all__ = ["ClusterEngine", "EngineFacts", "Engines"]

_log = logging.getLogger(__name__)
READY_S = 5.0
"""The seconds within which a live engine reports that it is ready."""
POLL_S = 0.5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The facts that are known of a started engine."""

    vocab_size: int
    context_window: int
    dtype: str


@dataclass(frozen=True, eq=False)
class Engines:
    """The engine actors of a run and their common facts."""

    actors: Sequence[Actor]
    facts: EngineFacts
    """The facts that hold for all of them."""
    patience_s: float
    """The seconds that a request waits while all of them restart."""


class ActorReplica:
    """A `Replica` that is an `EngineActor`."""

    def __init__(self, actor: Actor, dtype: str) -> None:
        self.actor = actor
        self.dtype = dtype
        self.posted: Posted | None = None
        """The weights of the next update."""
        self.seat: Seat | None = None
        """Its place in the broadcast of the next update."""
        self._check = WeightCheck(actor.label, is_exact=True)

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return self.actor.label

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, version: int) -> Completion:
        """Samples one reply; the actor decodes with a tokenizer of its own."""
        sent = replace(sampling, decode=None)
        completion: Completion = await self._call("generate", prompt_ids, sent, process_session(rid))
        return completion

    async def abort(self, rid: str | None) -> None:
        """Aborts the request of a session."""
        if rid is not None:
            await self._call("abort", process_session(rid))

    async def is_alive(self) -> bool:
        """True if the actor answers, also after a restart."""
        try:
            async with asyncio.timeout(READY_S):
                return bool(await self._call("is_ready"))
        except (HttpUnreachable, TimeoutError):
            return False

    async def pause(self) -> None:
        """Stops sampling at a token boundary."""
        await self._call("pause")

    async def resume(self) -> None:
        """Resumes sampling."""
        await self._call("resume")

    async def flush(self) -> None:
        """Empties the prefix cache."""
        await self._call("flush")

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Makes the actor take the newest shipment, and compares the digests of what arrived."""
        posted = self.posted
        if posted is None or posted.version != version:
            raise EngineError(f"no shipment of version {version} was made for {self.name}")
        seat, self.seat = self.seat, None  # asked again, it fetches them
        answer: tuple[WeightSync, dict[str, str]] = await self._call("update", posted, seat)
        sync, digests = answer
        if digests:
            self._check.compare(posted.shipment.digests, digests, version)
        return sync

    async def place(self) -> tuple[str, str | None]:
        """Returns the actor's node and the group from which it has weights; no node if it does not answer."""
        try:
            async with asyncio.timeout(READY_S):
                found: tuple[str, str | None] = await self._call("place")
                return found
        except (HttpUnreachable, TimeoutError):
            return "", None

    async def close(self) -> None:
        """Does nothing: the cluster ends its actors."""

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self.actor.call(method, *arguments)
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
        self._invitation: GroupAddress | None = None
        """The group in which the learner broadcasts weights."""

    def _check_versions(self, completion: Completion, name: str) -> None:
        """Does nothing: each engine checks its own, and a worker does not know which weights are the newest."""

    async def take_shipment(self, shipment: Shipment, version: int, sender: Actor | None = None) -> WeightSync:
        """Has all engines take the weights of a shipment, and those that restart later.

        The `sender`, rank 0 of the learner, broadcasts them to engines on other nodes.
        Raises LearnerLost if the rank that shipped them died meanwhile.
        """
        assert self._keeper is not None
        posted = Posted(version, shipment)
        await self._keeper.post(posted)
        for replica in cast("tuple[ActorReplica, ...]", self.replicas):
            replica.posted, replica.seat = posted, None
        try:
            sending = sender and await self._begin_broadcast(shipment, sender)
            try:
                sync = await self.update_weights({}, version)
            finally:
                if sending:
                    await self._end_broadcast(sending)
        except (ParcelLost, ActorLost) as error:
            raise LearnerLost(f"weights of version {version} did not arrive: {error}") from error
        for index in set(range(len(self.replicas))) - set(self.router.alive):
            self._actors[index].tell("catch_up")  # it may be alive and have answered too late
        return replace(sync, gather_s=sync.gather_s + shipment.gather_s)

    async def _begin_broadcast(self, shipment: Shipment, sender: Actor) -> asyncio.Task[None] | None:
        """Gives engines on other nodes a seat in a group with the sender, which begins to send; None without any."""
        replicas = [cast(ActorReplica, self.replicas[index]) for index in self.router.alive]
        places = await asyncio.gather(*(replica.place() for replica in replicas))
        far = [
            (replica, group)
            for replica, (node, group) in zip(replicas, places, strict=True)
            if node not in ("", shipment.node)
        ]
        if not far:
            return None
        given, groups = self._invitation, {group for _, group in far}
        if given is None or groups != {given.name} or given.num_ranks != 1 + len(far):
            given = self._invitation = await sender.call("invite", 1 + len(far))
        for rank, (replica, _) in enumerate(far, 1):
            replica.seat = Seat(given, rank)
        return asyncio.ensure_future(sender.call("send"))

    async def _end_broadcast(self, sending: asyncio.Task[None]) -> None:
        """Waits for the sender; if an engine was gone, there is a new group the next time."""
        try:
            await sending
        except ActorLost:
            raise
        except EngineError as error:
            _log.warning("the learner could not send weights to all engines: %s", error)
            self._invitation = None

    async def abort(self, session: str) -> None:
        """Aborts the session's request in flight, and makes the engines forget the session."""
        await super().abort(session)
        for index in self.router.alive:
            self._actors[index].tell("abort", f"{session}#{self._mark}"[:-1])

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
