"""The in-process engine: the trained model itself generates, batching continuously over one preallocated cache.

The event loop only submits and awaits; worker threads run the steps. A reply depends bit for bit only on its prompt
ids, its sampling and the weights, and not on other requests in flight or on the contents of the cache (see `step`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentgym.cores import num_cores
from agentgym.engines.local.batch_invariance import batch_invariance_findings
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler
from agentgym.engines.local.kernels.row_products import forget_packed, keep_packed
from agentgym.engines.local.kv_cache import SlotCache, fitting_slots
from agentgym.engines.local.live_weights import LiveWeights
from agentgym.engines.local.machine_memory import total_memory
from agentgym.engines.local.runners import make_runner
from agentgym.engines.local.scheduler import SamplingRequest, Scheduler, checked_prompt
from agentgym.engines.local.worker import EngineWorker
from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.errors import ConfigError, EngineError
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import own_tensors
from agentgym.model.published_weights import Weights
from agentgym.model.transformers_model import TransformersModel

__all__ = ["LocalEngine"]

# Shape suffix: T tokens of a prompt.

_log = logging.getLogger(__name__)
_SMALL_MODEL = 20_000_000  # parameters; below it calling operators is much of the work
_PACKED_PART = 8  # weights are kept in a second order too if they are at most this part of the machine's memory
_CLOSING_S = 0.005  # between two checks that the workers have ended
_MIN_SESSIONS = 16  # a worker is worth it from so many sessions on, and a group of so many stays together
_MAX_PROMPTS = 1000  # of which it is known which worker read them last
_GPU_PRODUCTS = "a GPU multiplies other numbers of rows by other kernels"
_CLOSED = "the local engine is closed; make a new one"


class LocalEngine:
    """Samples from a live model: no copy and no transfer of weights, since training shares the tensors.

    A trainer calls `pause`, changes the weights, `update_weights({}, version)`, `resume`. Weights that change under a
    request, or are used without the call, raise EngineError: the cached keys would be those of older weights. If
    another copy of the model is trained, its weights are given to `update_weights`, and no pause is needed: they are
    copied between two steps. Replies in flight during an update continue under the new weights, with their cache
    recomputed, and record both versions.
    """

    def __init__(self, model: LanguageModel, config: LocalEngineConfig | None = None, *, version: int = 0) -> None:
        self.config = config or LocalEngineConfig()
        self.model = model
        window = self.config.window or model.context_window
        if window > model.context_window:
            raise ConfigError(f"window {window} is over the model's context window {model.context_window}; lower it")
        self._window, self._weights = window, LiveWeights(model, version)
        records = self.config.record_experts
        num_slots = self.config.num_slots or fitting_slots(model, window, record_experts=records)
        is_small = sum(parameter.numel() for parameter in self._weights.parameters) < _SMALL_MODEL
        on_cpu = model.embed.device.type == "cpu"
        self._frees_keys = on_cpu and not is_small
        is_fast = on_cpu and isinstance(model, Decoder)
        self.compiles = is_fast and model.embed.dtype == torch.float32 and cpp_compiler() is not None
        """True if the steps will run compiled, by what `prepare` or the first request makes."""
        num_workers = 1
        if is_small and is_fast:
            num_workers = max(1, min(self.config.threads or min(2, num_cores()), num_slots // _MIN_SESSIONS))
        caches = [SlotCache(model, -(-num_slots // num_workers), window) for _ in range(num_workers)]
        if records:
            for cache in caches:
                cache.record_experts(model)
        self._inbox_lock, self._prepare_lock, self._is_preparing = threading.Lock(), threading.Lock(), False
        self._reader_of: dict[int, EngineWorker] = {}
        self._workers = [
            EngineWorker(
                self._weights,
                Scheduler(cache, self.config.max_step_tokens, self.config.keep_idle_s),
                self._inbox_lock,
                self._prepare,
                1 if is_small else self.config.threads,
            )
            for cache in caches
        ]

    @property
    def vocab_size(self) -> int:
        """The number of token ids: ids in `[0, vocab_size)` may be sent."""
        return self.model.vocab_size

    @property
    def context_window(self) -> int:
        """The most tokens that prompt and reply may have together."""
        return self._window

    @property
    def version(self) -> int:
        """The policy version of the next sampled token."""
        return self._weights.version

    @property
    def num_steps(self) -> int:
        """The number of forward passes so far, of all workers."""
        return sum(worker.num_steps for worker in self._workers)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Samples one reply; raises EngineError if it cannot (ids out of range, over the window, closed)."""
        prompt_T = checked_prompt(prompt_ids, sampling, self.vocab_size, self._window)
        worker = self._worker_for(session, prompt_T)
        if session in worker.in_flight:
            raise EngineError(f"session {session!r} has a request in flight; one at a time, or name another session")
        loop = asyncio.get_running_loop()
        request = SamplingRequest(prompt_T, sampling, session, loop.create_future(), loop)
        worker.in_flight[session] = request
        try:
            if not self._submit([worker], lambda: worker.scheduler.add(request)):
                raise EngineError(_CLOSED)
            return await request.future
        except asyncio.CancelledError:
            self._submit([worker], lambda: worker.cancel(request))
            raise
        finally:
            if worker.in_flight.get(session) is request:
                del worker.in_flight[session]

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Copies the weights, by their published names, and makes them version `version` from the next token on.

        Without any weights, the model's tensors were already changed. Raises EngineError if the version decreases, and
        for weights of another model.
        """
        if version < self.version:
            raise EngineError(f"policy versions never fall: the engine is at {self.version}, got {version}")
        started = time.perf_counter()
        if weights and self._weights.are_released:
            await self._command(lambda: self._weights.regain(self._caches))
        tensors = own_tensors(self.model, weights)
        await self._command(lambda: self._renew(version, tensors))
        if not tensors:
            return WeightSync(version=version)
        num_bytes = sum(own.numel() * own.element_size() for own, _ in tensors)
        transfer_s = time.perf_counter() - started
        return WeightSync(version=version, num_tensors=len(tensors), num_bytes=num_bytes, transfer_s=transfer_s)

    async def prepare(self) -> None:
        """Compiles and tries the kernels now, so that the first request does not wait for it."""
        await self._command(self._prepare)

    async def pause(self) -> None:
        """Stops sampling at a token boundary and returns when no step runs; requests stay in flight."""
        await self._command(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self._command(lambda: self._set_paused(False))

    async def release_memory(self) -> None:
        """Frees the memory of weights and cache until the next update, which has to bring all weights.

        The engine has to be paused, and nothing else may use the model.
        """
        await self._command(self._release)

    async def abort(self, session: str) -> None:
        """Ends the session's request in flight with finish reason `abort`, and frees its slot."""
        worker = self._worker_with(session)
        if worker is not None:
            await self._command(lambda: worker.abort(session), [worker])

    async def close(self) -> None:
        """Ends requests in flight with EngineError and waits for the workers; a second call does nothing.

        A compilation cannot be stopped and is not waited for: its thread is a daemon and ends after it.
        """
        with self._inbox_lock:
            for worker in self._workers:
                worker.close()
        while any(worker.is_alive for worker in self._workers) and not self._is_preparing:
            await asyncio.sleep(_CLOSING_S)

    def record_experts(self) -> None:
        """Reports the experts of each token of a mixture from now on; tokens in the cache are computed again."""
        self._submit(self._workers, threading.Barrier(len(self._workers), self._record_experts).wait)

    @property
    def _caches(self) -> list[SlotCache]:
        return [worker.cache for worker in self._workers]

    def _worker_for(self, session: str, prompt_T: NDArray[np.int64]) -> EngineWorker:
        """Returns the worker that has the session, else one that read its prompt, else the one with fewest sessions."""
        home = self._worker_with(session)
        if home is not None:
            return home
        fewest = min(self._workers, key=lambda worker: (worker.num_sessions, len(worker.in_flight)))
        if len(self._workers) == 1:
            return fewest
        prompt = hash(prompt_T.tobytes())
        reader = self._reader_of.get(prompt, fewest)
        has_room = reader.num_sessions < min(fewest.num_sessions + _MIN_SESSIONS, reader.cache.num_slots)
        if len(self._reader_of) >= _MAX_PROMPTS:
            self._reader_of.clear()
        self._reader_of[prompt] = chosen = reader if has_room else fewest
        return chosen

    def _worker_with(self, session: str) -> EngineWorker | None:
        return next((worker for worker in self._workers if worker.has(session)), None)

    async def _command(self, act: Callable[[], None], workers: Sequence[EngineWorker] = ()) -> None:
        """Calls `act` while the workers, all of them by default, are between two steps; raises EngineError if it fails.

        If the engine is closed, nothing is called.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            failure: EngineError | None = None
            try:
                act()
            except Exception as error:  # noqa: BLE001  a failed command fails its caller, not the worker
                failure = EngineError(f"the local engine failed: {error}")
                failure.__cause__ = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, done, failure)

        workers = workers or self._workers
        if self._submit(workers, threading.Barrier(len(workers), run).wait):
            await done

    def _submit(self, workers: Sequence[EngineWorker], act: Callable[[], object]) -> bool:
        """Has each of the workers call `act` between two steps; returns False if one has stopped, and none will."""
        with self._inbox_lock:
            if any(worker.has_stopped for worker in workers):
                return False
            for worker in workers:
                worker.give(act)
            return True

    # Everything below runs on the thread of a worker, and while the others wait, but for `_prepare`.

    def _prepare(self) -> None:
        """Makes what computes the steps of all workers, unless it was made."""
        with self._prepare_lock:
            if self._workers[-1].runner is not None:
                return
            if self._workers[0].is_closed:
                raise EngineError(_CLOSED)
            self._is_preparing = True
            try:
                self._make_runners()
            finally:
                self._is_preparing = False

    def _make_runners(self) -> None:
        assert isinstance(self.model, Decoder | TransformersModel)
        parameters = self._weights.parameters
        if sum(parameter.nbytes for parameter in parameters) * _PACKED_PART <= total_memory():
            keep_packed(parameters)  # compiles the kernel, which may take long
        runners = [make_runner(self.model, cache, compiles=self.compiles) for cache in self._caches]
        on_gpu = self.model.embed.device.type == "cuda"
        for finding in [_GPU_PRODUCTS] if on_gpu else batch_invariance_findings(runners[0]):
            _log.warning("replies may depend on what else is in flight: %s", finding)
        for worker, runner in zip(self._workers, runners, strict=True):
            worker.runner = runner

    def _renew(self, version: int, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._weights.update(version, tensors)
        for worker in self._workers:
            worker.scheduler.restart()

    def _record_experts(self) -> None:
        for worker in self._workers:
            worker.cache.record_experts(self.model)
            worker.scheduler.restart()

    def _release(self) -> None:
        for worker in self._workers:
            forget = getattr(worker.runner, "forget", None)
            if forget is not None:
                forget()
        self._weights.release(self._caches)

    def _set_paused(self, paused: bool) -> None:
        for worker in self._workers:
            worker.is_paused = paused
        if paused:  # the learner has a use for that memory
            forget_packed(self._weights.parameters, free=True)
            if self._frees_keys and not any(worker.in_flight for worker in self._workers):
                for cache in self._caches:
                    cache.release_memory()


def _settle(done: asyncio.Future[None], failure: EngineError | None) -> None:
    if done.done():  # the task that waited may have been cancelled meanwhile
        return
    if failure:
        done.set_exception(failure)
    else:
        done.set_result(None)
