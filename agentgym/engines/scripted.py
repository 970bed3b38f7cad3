"""An engine whose replies come from a function: exact ids, delays, faults and weight updates on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agentgym.engines.protocol import Completion, FinishReason, Sampling, WeightSync
from agentgym.errors import EngineError
from agentgym.model.published_weights import Weights

__all__ = ["Fault", "LogNormalDelay", "Reply", "ScriptedEngine", "ScriptedReply"]

Fault: TypeAlias = Literal["raise", "hang", "abort", "lengths"]
"""The fault of a reply: `raise` an EngineError; `hang` until aborted; `abort` after half of the ids; `lengths` gives
one logprob too few."""

DEFAULT_LOGPROB = -0.25


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """A complete reply: `ScriptedReply((9, 2), logprobs=(-0.5, -0.125))`, or `ScriptedReply(fault="raise")`."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    """The logprob of each id; None makes each `-0.25`."""
    delay_s: float = 0.0
    """Seconds before the first id, in addition to the engine's own delay."""
    fault: Fault | None = None


Reply: TypeAlias = Callable[[str, Sequence[int], Sampling], "Sequence[int] | ScriptedReply"]
"""`(session, prompt_ids, sampling) -> reply`; the ids are cut after the first stop id and at `max_tokens`."""


class LogNormalDelay:
    """Seeded log-normal seconds: `LogNormalDelay(median_s=0.2, sigma=1.0, seed=0)` for the `delay_s` of an engine."""

    def __init__(self, median_s: float, sigma: float, seed: int = 0) -> None:
        self.median_s = median_s
        self.sigma = sigma
        self._random = random.Random(seed)

    def __call__(self) -> float:
        return self.median_s * self._random.lognormvariate(0.0, self.sigma)


@dataclass(slots=True)
class _Request:
    """A reply in flight: the planned ids, and how many of them were sampled."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    fault: Fault | None
    versions: list[int] = field(default_factory=list)
    aborted: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """An Engine whose sampler is `reply`.

    `delay_s` (a number, or a function giving one per request) passes before the first id and `token_s` before each id.
    With `on_update="abort"`, `update_weights` ends what is in flight with finish reason `abort` (as an engine that
    retracts does), and the next request of that session continues what was planned. With `"continue"` it keeps
    sampling, so that later ids of the reply have the new version.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        vocab_size: int = 1 << 20,
        context_window: int = 1 << 20,
        delay_s: float | Callable[[], float] = 0.0,
        token_s: float = 0.0,
        on_update: Literal["continue", "abort"] = "continue",
    ) -> None:
        self._reply = reply
        self._vocab_size = vocab_size
        self._context_window = context_window
        self._delay_s = delay_s
        self._token_s = token_s
        self._on_update = on_update
        self._in_flight: dict[str, _Request] = {}
        self._unfinished: dict[str, tuple[int, _Request]] = {}
        self._paused = False
        self._closed = False
        self.version = 0
        self.num_requests = 0
        self.sessions: set[str] = set()
        """The sessions that were used and not aborted yet; empty if every episode cleaned up after itself."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids: ids in `[0, vocab_size)` may be sent."""
        return self._vocab_size

    @property
    def context_window(self) -> int:
        """The most tokens that prompt and reply may have together."""
        return self._context_window

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Returns the script's reply; raises EngineError for a prompt that no engine would accept, and on demand."""
        self._check(prompt_ids, sampling, session)
        self.num_requests += 1
        self.sessions.add(session)
        request, delay_s = self._plan(prompt_ids, sampling, session)
        self._in_flight[session] = request
        try:
            await self._wait(request, delay_s)
            await self._emit(request, min(len(request.ids), sampling.max_tokens))
        finally:
            del self._in_flight[session]
        return self._complete(request, prompt_ids, sampling, session)

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Makes later ids have the version `version`; requests in flight continue, or end (see `on_update`)."""
        if version < self.version:
            raise EngineError(f"policy versions never fall: got {version} after {self.version}")
        self.version = version
        if self._on_update == "abort":
            for session in tuple(self._in_flight):
                self._end(session)
        return WeightSync(version=version)

    async def pause(self) -> None:
        """Holds every request at its next id."""
        self._paused = True

    async def resume(self) -> None:
        """Lets held requests continue."""
        self._paused = False
        for request in self._in_flight.values():
            request.wake.set()

    async def abort(self, session: str) -> None:
        """Ends the session's request in flight and forgets the session."""
        self._end(session)
        self._unfinished.pop(session, None)
        self.sessions.discard(session)

    async def close(self) -> None:
        """Ends everything in flight; later requests raise."""
        self._closed = True
        for session in tuple(self._in_flight):
            self._end(session)

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> None:
        if self._closed:
            raise EngineError("the engine is closed: make a new one")
        if session in self._in_flight:
            raise EngineError(f"session {session!r} already has a request in flight; a session is one episode")
        if len(prompt_ids) + sampling.max_tokens > self._context_window:
            raise EngineError(
                f"{len(prompt_ids)} prompt ids and max_tokens={sampling.max_tokens} exceed the context window of "
                f"{self._context_window}"
            )

    def _plan(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> tuple[_Request, float]:
        length, unfinished = self._unfinished.pop(session, (0, None))
        if unfinished is not None and length == len(prompt_ids):
            done = len(unfinished.versions)
            return _Request(unfinished.ids[done:], unfinished.logprobs[done:], None), 0.0
        reply = self._reply(session, prompt_ids, sampling)
        if not isinstance(reply, ScriptedReply):
            reply = ScriptedReply(reply)
        ids = tuple(_through_stop(reply.ids, sampling.stop_ids))
        logprobs = (DEFAULT_LOGPROB,) * len(ids) if reply.logprobs is None else tuple(reply.logprobs)[: len(ids)]
        delay_s = self._delay_s() if callable(self._delay_s) else self._delay_s
        return _Request(ids, logprobs, reply.fault), delay_s + reply.delay_s

    async def _wait(self, request: _Request, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if request.fault == "raise":
            raise EngineError("the script asked for a failure")
        while (self._paused or request.fault == "hang") and not request.aborted:
            request.wake.clear()
            await request.wake.wait()

    async def _emit(self, request: _Request, num_ids: int) -> None:
        """Samples `num_ids` ids, one version each, unless the request is aborted meanwhile."""
        if request.fault == "abort":
            num_ids //= 2
        if not self._token_s:
            if not request.aborted:
                request.versions = [self.version] * num_ids
            return
        while len(request.versions) < num_ids and not request.aborted:
            await self._wait(request, self._token_s)
            if not request.aborted:
                request.versions.append(self.version)

    def _complete(self, request: _Request, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        num_ids = len(request.versions)
        ids, logprobs = tuple(request.ids[:num_ids]), tuple(request.logprobs[:num_ids])
        finish: FinishReason = "length"
        if request.aborted or request.fault == "abort":
            finish = "abort"
            if session in self.sessions:  # else `abort` ended it, and no request of the session follows
                self._unfinished[session] = (len(prompt_ids) + num_ids, request)
        elif ids and (not sampling.stop_ids or ids[-1] in sampling.stop_ids):
            finish = "stop"
        if request.fault == "lengths":
            logprobs = logprobs[:-1]
        return Completion(ids, logprobs, tuple(request.versions), finish)

    def _end(self, session: str) -> None:
        request = self._in_flight.get(session)
        if request is not None:
            request.aborted = True
            request.wake.set()


def _through_stop(ids: Sequence[int], stop_ids: tuple[int, ...]) -> Sequence[int]:
    """Returns `ids` up to and including the first stop id."""
    if frozenset(stop_ids).isdisjoint(ids):
        return ids
    return ids[: 1 + min(ids.index(token) for token in stop_ids if token in ids)]
