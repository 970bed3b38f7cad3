"""A thread of the in-process engine: it samples the replies of its sessions, over a cache of its own.

Threads inside one operator wait for each other at every operator, which takes longer than a small model's products. So
a small model has several workers, which share only its weights: while one computes, another's Python runs. A reply
depends on nothing else in flight, and so not on its worker either.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.live_weights import LiveWeights
from agentgym.engines.local.runners import Runner
from agentgym.engines.local.sampling import draw
from agentgym.engines.local.scheduler import SamplingRequest, Scheduler
from agentgym.engines.protocol import Completion
from agentgym.errors import EngineError

__all__ = ["EngineWorker"]

# Shape suffixes: R sampled rows, V vocabulary.

_Delivery = tuple[SamplingRequest, "Completion | EngineError"]


class EngineWorker:
    """Samples on a thread of its own, which begins at once; other threads give it functions to call between two steps.

    `lock` is that of the engine, under which functions are given to several workers in the same order. `prepare` sets
    `runner`, if it is not set yet.
    """

    def __init__(
        self,
        weights: LiveWeights,
        scheduler: Scheduler,
        lock: threading.Lock,
        prepare: Callable[[], None],
        num_threads: int | None,
    ) -> None:
        self.scheduler = scheduler
        self.in_flight: dict[str, SamplingRequest] = {}
        """The requests by session, until their caller has the reply."""
        self.runner: Runner | None = None
        self.num_steps = 0
        self.is_paused = self.is_closed = self.has_stopped = False
        self._weights, self._prepare, self._num_threads = weights, prepare, num_threads
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition(lock)
        self._thread = threading.Thread(target=self._work, name="agentgym-local-engine", daemon=True)
        self._thread.start()

    @property
    def cache(self) -> SlotCache:
        """The keys and values of the worker's sessions."""
        return self.scheduler.cache

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended."""
        return self._thread.is_alive()

    @property
    def num_sessions(self) -> int:
        """About how many sessions have a request here or a slot to go on with; exact while nothing begins or ends."""
        return len(self.in_flight) + self.cache.num_idle

    def has(self, session: str) -> bool:
        """Returns whether the session has a request in flight here, or a slot."""
        return session in self.in_flight or self.cache.has_slot(session)

    def give(self, act: Callable[[], object]) -> None:
        """Has the thread call `act` between two steps; the caller holds the lock, and the worker has not stopped."""
        self._inbox.append(act)
        self._wake.notify()

    def close(self) -> None:
        """Has the thread end after its step; the caller holds the lock."""
        self.is_closed = True
        self._wake.notify()

    # Everything below runs on the worker's thread only.

    def abort(self, session: str) -> None:
        """Ends the session's request with what it has sampled, and frees its slot."""
        request = self.in_flight.get(session)
        if request is not None and not self._is_over(request):
            completion = self.scheduler.completion(request, "abort")
            self.scheduler.end(request)
            _deliver([(request, completion)])
        self.cache.release(session)

    def cancel(self, request: SamplingRequest) -> None:
        """Ends a request that nobody waits for."""
        if not self._is_over(request):
            self.scheduler.end(request)

    def _work(self) -> None:
        device = self._weights.parameters[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # on which Triton launches its kernels
        elif self._num_threads is not None and device.type == "cpu":
            torch.set_num_threads(self._num_threads)
        while not self.is_closed:
            self._empty_inbox()
            if self.is_paused or not (self.scheduler.active or self.scheduler.waiting):
                self._sleep(None)
            else:
                _deliver(self._guarded_step())
        with self._wake:
            self.has_stopped = True
        self._empty_inbox()  # without the lock, for what is in it may wait for other workers, who need it to stop
        _deliver(self._fail_all(EngineError("it was closed")))

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _sleep(self, timeout_s: float | None) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self.is_closed, timeout_s)

    def _guarded_step(self) -> list[_Delivery]:
        try:
            self._prepare()
            self.scheduler.admit()
            if self.scheduler.active:
                return self._step()
        except Exception as error:  # noqa: BLE001  the one boundary: a failed step fails its requests, not the worker
            self.cache.erase()
            return self._fail_all(error)
        self._sleep(self.scheduler.patience_s())
        return []

    @torch.inference_mode()
    def _step(self) -> list[_Delivery]:
        scheduler = self.scheduler
        self._weights.check()
        rows = scheduler.plan()
        assert self.runner is not None
        logits_RV = self.runner.forward(rows)
        self.num_steps += 1
        slot_R = rows.slot_N[rows.output_R]
        ids, logprobs = self._draw(logits_RV, slot_R)
        ended = scheduler.commit(rows, ids, logprobs, self._weights.version)
        return [(request, scheduler.completion(request)) for request in ended]

    def _draw(
        self, logits_RV: torch.Tensor, slot_R: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        scheduler = self.scheduler
        id_R, logprob_R = draw(
            scheduler.with_penalties(logits_RV, slot_R),
            scheduler.uniform_R(slot_R),
            scheduler.temperature_S[slot_R],
            scheduler.top_k_S[slot_R],
            scheduler.top_p_S[slot_R],
            scheduler.min_p_S[slot_R],
        )
        logprobs = logprob_R.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise EngineError(
                f"the logits are not finite: the weights of version {self._weights.version} have diverged"
            )
        return id_R.cpu().numpy(), logprobs

    def _fail_all(self, cause: Exception) -> list[_Delivery]:
        failed = [*self.scheduler.active.values(), *self.scheduler.waiting.values()]
        deliveries: list[_Delivery] = []
        for request in failed:
            self.scheduler.end(request)
            error = EngineError(f"the local engine failed with {len(failed)} requests in flight: {cause}")
            error.__cause__ = cause
            deliveries.append((request, error))
        return deliveries

    def _is_over(self, request: SamplingRequest) -> bool:
        if request.slot < 0:
            return self.scheduler.waiting.get(request.session) is not request
        return self.scheduler.active.get(request.slot) is not request


def _deliver(deliveries: Sequence[_Delivery]) -> None:
    for loop, group in itertools.groupby(deliveries, key=lambda delivery: delivery[0].loop):
        results = [(request.future, result) for request, result in group]
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, results)


def _resolve(results: Sequence[tuple[asyncio.Future[Completion], Completion | EngineError]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)
