"""An engine in an actor: a model in its process, or a server on its node that the actor owns.

Imports torch in that process alone, since whoever calls the actor imports this module.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.servers.http import HttpUnreachable
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.errors import EngineError
from agentgym.trainers.cluster.actors import Actor, ActorLost, restore_path, was_restarted
from agentgym.trainers.cluster.board import Board, Posted, report_warnings

if TYPE_CHECKING:
    from agentgym.trainers.cluster.inner_engine import InnerEngine, Part

__all__ = ["EngineActor", "EngineFacts"]

_log = logging.getLogger(__name__)
NEWEST_S = 30.0
"""The seconds that a restarted engine waits for weights on the board, which may be restarting too."""
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The facts that are known of a started engine."""

    vocab_size: int
    context_window: int
    dtype: str


class EngineActor:
    """Serves one engine; after a restart it takes the newest weights before it answers.

    If a server that it owns dies, the actor ends too, so that both are restarted. Methods raise HttpUnreachable while
    the server is dead.
    """

    def __init__(self, label: str, part: Part, board: Actor[Board]) -> None:
        report_warnings(label, board)
        restore_path()
        self._label = label
        self._part = part
        self._board = board
        self._inner: InnerEngine | None = None
        self._opening: asyncio.Task[InnerEngine] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._taking = asyncio.Lock()
        self._is_paused = False
        self._is_released = False
        """True if the engine's memory was released."""

    async def identity(self) -> EngineFacts:
        """Waits until the engine can answer, and returns its facts."""
        async with self._engine_that_answers() as inner:
            engine = inner.engine
            return EngineFacts(vocab_size=engine.vocab_size, context_window=engine.context_window, dtype=inner.dtype)

    async def is_ready(self) -> bool:
        """True if the engine can answer now; otherwise it is opened in the background."""
        opening = self._open()
        if not opening.done():
            return False
        if (failure := opening.exception()) is not None:
            if self._inner is None:
                _log.warning("it cannot be restarted: %s", failure)
            self._opening = None
            return False
        if await opening.result().is_alive():
            return True
        self._opening = None  # a server that is not ours: it is opened again, and gets the newest weights first
        self._open()
        return False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Samples one reply, once the engine answers."""
        async with self._engine_that_answers() as inner:
            return await inner.generate(prompt_ids, sampling, session)

    async def abort(self, session: str) -> None:
        """Ends the generation of a session, if the engine is open."""
        if self._inner is not None:
            await self._inner.engine.abort(session)

    async def pause(self) -> None:
        """Pauses generation; an engine that shares its GPUs with the learner releases its memory."""
        async with self._engine_that_answers() as inner:
            await inner.engine.pause()
            self._is_paused = True
            if self._part.config.ray.layout == "colocated" and not self._is_released:
                await inner.release_memory()
                self._is_released = True

    async def resume(self) -> None:
        """Continues after `pause`; an engine whose memory was released takes the newest weights first."""
        async with self._engine_that_answers() as inner:
            if self._is_released and (posted := await self._newest()) is not None:
                await self._take(inner, posted)
            self._is_paused = False
            await inner.engine.resume()

    async def flush(self) -> None:
        """Empties a server's prefix cache; the in-process model reads no stale entries."""
        async with self._engine_that_answers() as inner:
            if isinstance(inner.engine, ReplicatedEngine):
                await inner.engine.flush()

    async def prepare(self) -> None:
        """Does now what the first request would otherwise wait for."""
        async with self._engine_that_answers() as inner:
            await inner.prepare()

    async def update(self, posted: Posted) -> tuple[WeightSync, dict[str, str]]:
        """Loads shipped weights and returns the digests of the loaded weights, for the caller to compare.

        A server compares them itself. The weights are fetched while the engine samples.
        """
        async with self._engine_that_answers() as inner:
            return await self._take(inner, posted)

    async def catch_up(self) -> None:
        """Takes the newest weights if it has older ones, and resumes; it may have missed an update."""
        async with self._engine_that_answers() as inner:
            posted = await self._board.call(Board.newest)
            if posted is not None and posted.version > self._version:
                await self._take(inner, posted)
            if self._is_paused:
                await self.resume()

    def _open(self) -> asyncio.Task[InnerEngine]:
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open_engine())
        return self._opening

    @asynccontextmanager
    async def _engine_that_answers(self) -> AsyncIterator[InnerEngine]:
        """Yields the engine once it can answer.

        If its server is dead, its errors and those of its restart become HttpUnreachable. The caller then waits, or
        asks another engine.
        """
        try:
            yield await asyncio.shield(self._open())
        except EngineError as error:
            is_dead = was_restarted() if self._inner is None else not await self._inner.is_alive()
            if not is_dead:
                raise
            raise HttpUnreachable(f"{self._label} has lost its server: {error}") from error

    async def _open_engine(self) -> InnerEngine:
        """Returns the engine, with the newest weights if it did not start with the run."""
        from agentgym.trainers.cluster.inner_engine import open_inner

        inner, is_first = self._inner, self._inner is None and not was_restarted()
        if inner is None:
            folder = await asyncio.to_thread(self._part.files.folder, self._part.folder)
            inner = self._inner = await open_inner(replace(self._part, folder=str(folder)))
            self._version = self._part.version
            self._watch = asyncio.ensure_future(self._end_with(inner))
        if not is_first and (posted := await self._newest()) is not None:
            await self._take(inner, posted)
        return inner

    async def _newest(self) -> Posted | None:
        """Returns the newest weights on the board, or None if there are none within NEWEST_S."""
        ends = asyncio.get_running_loop().time() + NEWEST_S
        posted: Posted | None = None
        while posted is None and asyncio.get_running_loop().time() < ends:
            with suppress(ActorLost):
                posted = await self._board.call(Board.newest)
            if posted is None:
                await asyncio.sleep(POLL_S)
        return posted

    async def _take(self, inner: InnerEngine, posted: Posted) -> tuple[WeightSync, dict[str, str]]:
        from agentgym.trainers.cluster.weight_store import read_weights

        async with self._taking:
            started = time.perf_counter()
            tensors = await read_weights(posted.shipment)
            fetched = time.perf_counter()
            sync, digests = await inner.take(tensors, posted.version, is_paused=self._is_paused)
            self._version = posted.version
            self._is_released = False
        return replace(sync, transfer_s=sync.transfer_s + fetched - started), digests

    async def _end_with(self, inner: InnerEngine) -> None:
        ending = await inner.end()
        try:
            await self._board.call(Board.warn, self._label, logging.WARNING, f"{ending}; both are restarted")
        finally:
            os._exit(1)  # the only end after which Ray restarts an actor
