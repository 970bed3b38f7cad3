"""An engine of several servers with the same weights: sessions stay on their server, and survive its death."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable
from agentgym.engines.servers.router import ReplicaRouter
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.engines.servers.serving_settings import EngineServing, ServingSettings
from agentgym.errors import EngineError
from agentgym.model.published_weights import Weights

__all__ = ["Replica", "ReplicatedEngine"]

_log = logging.getLogger(__name__)
_ABORT_S = 3.0
"""Seconds that an aborted request may take to return what it has."""
_NOTHING = Completion((), (), (), "abort")
_T = TypeVar("_T")


class Replica(Protocol):
    """One server. Methods raise HttpUnreachable if it does not answer, HttpRefusal if it answers with an error."""

    @property
    def name(self) -> str:
        """The server's name in messages."""

    @property
    def dtype(self) -> str:
        """The dtype of its weights, such as `float32`; `auto` if it does not report it."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, version: int) -> Completion:
        """Samples one reply under the request id `rid`; `version` is the expected policy version."""

    async def abort(self, rid: str | None) -> None:
        """Ends the request `rid` (None: all of them); each returns with the finish reason `abort`."""

    async def is_alive(self) -> bool:
        """Returns whether the server answers at all."""

    async def pause(self) -> None:
        """Stops sampling at a token boundary."""

    async def resume(self) -> None:
        """Continues after `pause`."""

    async def flush(self) -> None:
        """Empties the prefix cache."""

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Loads and checks new weights; no request may read what older ones left in the cache."""

    async def close(self) -> None:
        """Disconnects from the server, and ends it if it was started for us."""


@dataclass(slots=True)
class _Flight:
    """A session's request in flight."""

    task: asyncio.Task[Any] | None
    rid: str = ""
    """The id of the request that was sent and is not answered; empty while it waits to be sent."""
    replica: int = -1
    aborted: bool = False
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicatedEngine:
    """An Engine over one or several servers with the same weights. Takes grammars (`Sampling.grammar`).

    A session's requests stay on one server while load is balanced (`ReplicaRouter`). A server that dies is left, and
    its requests are sampled again elsewhere (what it had streamed is kept). It is used again if it answers at a weight
    update. A reply whose connection broke is not used: no id is ever recorded twice.
    """

    takes_grammar = True
    updates_running = False
    """True if weights may be updated without a pause, because the replicas handle requests in flight."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        settings: ServingSettings,
        *,
        vocab_size: int,
        context_window: int,
        version: int = 0,
    ) -> None:
        self.settings = EngineServing.of(settings)
        self.router = ReplicaRouter(len(replicas))
        self.replicas = tuple(replicas)
        self.processes: Sequence[ServerProcess] = ()
        """The servers that were launched for it."""
        self._vocab_size, self._context_window = vocab_size, context_window
        self._version = self._newest = version
        self._flights: dict[str, _Flight] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._closed = False
        self._numbers = itertools.count()
        self._mark = secrets.token_hex(4) + "."
        self._errands: set[asyncio.Task[Any]] = set()
        self.num_requests = 0
        """The number of requests that were sent, those sent again included."""
        self.num_lost = 0
        """The number of requests whose answer was lost with its server or connection, and that were sent again."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids: ids in `[0, vocab_size)` may be sent."""
        return self._vocab_size

    @property
    def context_window(self) -> int:
        """The most tokens that prompt and reply may have together."""
        return self._context_window

    @property
    def version(self) -> int:
        """The policy version of the next sampled token."""
        return self._version

    @property
    def dtype(self) -> str:
        """The dtype of the servers' weights, as the first one names it."""
        return self.replicas[0].dtype

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Samples one reply; raises EngineError if it cannot (bad ids, window exceeded, closed, all servers dead)."""
        self._check(prompt_ids, sampling, session)
        flight = self._flights[session] = _Flight(asyncio.current_task())
        try:
            return await self._send_until_answered(prompt_ids, sampling, session, flight)
        except asyncio.CancelledError:
            if not flight.aborted:
                self._tell(flight)  # the caller is gone
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # `abort` cancelled this task
            return _NOTHING
        finally:
            del self._flights[session]
            flight.landed.set()

    def _check_versions(self, completion: Completion, name: str) -> None:
        """Raises EngineError for a reply that weights of no version of ours sampled."""
        strange = [number for number in completion.policy_versions if not 0 <= number <= self._newest]
        if strange:
            raise EngineError(
                f"{name} sampled with weights of version {strange[0]}, and the newest of ours is {self._newest}:"
                " another client updates them"
            )

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Sends the weights to all servers and has each checked.

        Raises EngineError that names what did not arrive. A server that was dead is tried, and left if it stays dead.
        """
        if version < self._version:
            raise EngineError(f"policy versions never fall: the engine is at {self._version}, got {version}")
        await self.revive()
        self._newest = version  # while they are sent, replies are sampled with these weights already
        reports = await self._command_all(lambda replica: replica.update_weights(weights, version))
        self._version = version
        if len({report.checksum for report in reports}) > 1:
            raise EngineError("the servers have different weights after the same update")
        return max(reports, key=lambda report: report.transfer_s + report.load_s)

    async def pause(self) -> None:
        """Stops sampling at a token boundary, in the mode of the settings; later requests wait for `resume`."""
        self._open.clear()
        if self.settings.pause == "abort":
            flights = [flight for flight in self._flights.values() if flight.rid]
            await self._command_all(lambda replica: replica.abort(None))
            await _wait_for_landing(flights)
        await self._command_all(lambda replica: replica.pause())

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self._command_all(lambda replica: replica.resume())
        self._open.set()

    async def abort(self, session: str) -> None:
        """Ends the session's request in flight with finish reason `abort`, and forgets the session's server."""
        flight = self._flights.get(session)
        if flight is not None:
            flight.aborted = True
            if flight.rid:
                self._tell(flight)
                await _wait_for_landing([flight])
            if not flight.landed.is_set() and flight.task is not None:
                flight.task.cancel()
        self.router.forget(session)

    async def flush(self) -> None:
        """Empties the prefix caches; raises EngineError if requests in flight prevent it."""
        await self._command_all(lambda replica: replica.flush())

    async def close(self) -> None:
        """Ends requests in flight and servers that were started for this engine; a second call does nothing."""
        if self._closed:
            return
        if not self._open.is_set():
            await self._resume_all()
        self._closed = True
        for flight in list(self._flights.values()):
            flight.aborted = True
            if flight.task is not None:
                flight.task.cancel()
        for errand in list(self._errands):
            errand.cancel()
        if self._errands:
            await asyncio.wait(self._errands)
        for replica in self.replicas:
            await replica.close()

    async def _resume_all(self) -> None:
        """Leaves no server paused that others use; one that does not answer is left as it is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await asyncio.gather(*(_log_failure(self.replicas[index].resume()) for index in self.router.alive))

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        if session in self._flights:
            raise EngineError(f"session {session!r} has a request in flight; one at a time, or name another session")
        if not prompt_ids:
            raise EngineError("a prompt holds at least one id")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:  # one such id kills an SGLang server
            bad = next(token for token in prompt_ids if not 0 <= token < self._vocab_size)
            raise EngineError(f"prompt id {bad} is outside of the vocabulary of {self._vocab_size}")
        if len(prompt_ids) + sampling.max_tokens > self._context_window:
            raise EngineError(
                f"{len(prompt_ids)} prompt ids and max_tokens={sampling.max_tokens} exceed the context window of"
                f" {self._context_window}"
            )

    async def _send_until_answered(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str, flight: _Flight
    ) -> Completion:
        """Sends the request until a server answers it."""
        num_errors = 0
        while True:
            if not self._open.is_set():
                await self._open.wait()
            index = flight.replica = await self._acquire(session)
            replica = self.replicas[index]
            # Unlike the ids of any other client: SGLang ends what has the id of a stream two seconds after the stream.
            # The mark at the end: a server may take the id that it is to abort for the beginning of others.
            flight.rid = f"{session}#{self._mark}{next(self._numbers)};"
            started, answered_s = time.perf_counter(), None
            self.num_requests += 1
            try:
                completion = await replica.generate(prompt_ids, sampling, rid=flight.rid, version=self._version)
                answered_s = time.perf_counter() - started
                self._check_versions(completion, replica.name)
                return completion
            except HttpUnreachable as error:
                self.num_lost += 1
                if flight.aborted:
                    return _NOTHING
                num_errors += await self._note_lost_answer(flight, error)
                if num_errors > self.settings.max_retries:
                    raise
            except HttpRefusal as error:
                if flight.aborted:
                    return _NOTHING
                if error.status < 500:
                    raise
                if not await replica.is_alive():  # its HTTP front end still answers
                    self._leave(index, error)
                    continue
                num_errors += 1
                if num_errors > self.settings.max_retries:
                    raise
                _log.warning("sent again (%d of %d): %s", num_errors, self.settings.max_retries, error)
            finally:
                self.router.release(index, answered_s)
                flight.rid = ""

    async def _acquire(self, session: str) -> int:
        """Returns the server for a request, which is released afterwards; raises EngineError if all are dead."""
        return self.router.acquire(session)

    async def _note_lost_answer(self, flight: _Flight, error: HttpUnreachable) -> int:
        """Handles a missing answer: leaves a dead server (returns 0), or has a live one forget the request (1)."""
        if not await self.replicas[flight.replica].is_alive():
            self._leave(flight.replica, error)
            return 0
        self._tell(flight)
        return 1

    def _leave(self, index: int, reason: EngineError) -> None:
        if index in self.router.alive:
            self.router.mark(index, alive=False)
            left = len(self.router.alive)
            _log.warning("server %s is dead, %d left: %s", self.replicas[index].name, left, reason)

    def _tell(self, flight: _Flight) -> None:
        """Asks the server to end a request, without waiting."""
        if not flight.rid or self._closed:
            return
        errand = asyncio.ensure_future(_log_failure(self.replicas[flight.replica].abort(flight.rid)))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    async def revive(self) -> None:
        """Uses servers again that answer again; they have the newest weights, or are about to get them."""
        for index in set(range(len(self.replicas))) - set(self.router.alive):
            if await self.replicas[index].is_alive():
                self.router.mark(index, alive=True)
                _log.warning("server %s is back", self.replicas[index].name)

    async def _command_all(self, order: Callable[[Replica], Awaitable[_T]]) -> list[_T]:
        """Returns the answers to a command; a server without one is dead; raises EngineError if all are."""
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        indices = self.router.alive
        orders = (self._carried_out(order, self.replicas[index]) for index in indices)
        answers = await asyncio.gather(*orders, return_exceptions=True)
        good: list[_T] = []
        for index, answer in zip(indices, answers, strict=True):
            if isinstance(answer, HttpUnreachable):
                self._leave(index, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good.append(answer)
        if not good:
            names = ", ".join(replica.name for replica in self.replicas)
            raise EngineError(f"no server is left that answers: {names}")
        return good

    async def _carried_out(self, order: Callable[[Replica], Awaitable[_T]], replica: Replica) -> _T:
        """Returns a command's answer; asks a second time if the connection broke and the server is alive."""
        try:
            return await order(replica)
        except HttpUnreachable as error:
            if not await replica.is_alive():
                raise
            _log.warning("asked again: %s", error)
            return await order(replica)


async def _wait_for_landing(flights: Sequence[_Flight]) -> None:
    """Waits a while for requests to return."""
    waits = [asyncio.ensure_future(flight.landed.wait()) for flight in flights]
    if waits:
        _, pending = await asyncio.wait(waits, timeout=_ABORT_S)
        for wait in pending:
            wait.cancel()


async def _log_failure(work: Awaitable[None]) -> None:
    """Runs work whose result is not waited for; a server that is gone has nothing to end."""
    try:
        await work
    except EngineError as error:
        _log.debug("a request could not be ended: %s", error)
