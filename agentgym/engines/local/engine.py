"""The in-process engine: the trained model itself generates, batching continuously over one preallocated cache.

The event loop only submits and awaits; one worker thread runs the steps. A reply depends bit for bit only on its prompt
ids, its sampling and the weights, and not on other requests in flight or on the contents of the cache (see `step`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentgym.engines.local.batch_invariance import batch_invariance_findings
from agentgym.engines.local.compiled_step import make_step
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler
from agentgym.engines.local.kernels.row_products import forget_packed, keep_packed
from agentgym.engines.local.kv_cache import SlotCache, fitting_slots
from agentgym.engines.local.machine_memory import total_memory
from agentgym.engines.local.offload import regain_memory, release_memory
from agentgym.engines.local.sampling import draw
from agentgym.engines.local.scheduler import SamplingRequest, Scheduler, checked_prompt
from agentgym.engines.local.split_step import SplitStep, usual_parts
from agentgym.engines.local.transformers_graph import has_static_step
from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.errors import ConfigError, EngineError
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import own_tensors
from agentgym.model.published_weights import Weights
from agentgym.model.transformers_model import TransformersModel

__all__ = ["LocalEngine"]

_log = logging.getLogger(__name__)
_SMALL_MODEL = 20_000_000  # parameters; below it calling operators is much of the work: a compiled graph is best
_PACKED_PART = 8  # weights are kept in a second order too if they are at most this part of the machine's memory
_CLOSING_S = 0.005  # between two checks that the worker has ended
_GPU_PRODUCTS = "a GPU multiplies other numbers of rows by other kernels"
_CLOSED = "the local engine is closed; make a new one"
_RELEASED = -1  # replaces the weights' mark: a step before new weights fails, and reads nothing
_Delivery = tuple[SamplingRequest, "Completion | EngineError"]


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
        self._window, self._version, self._num_steps = window, version, 0
        records = self.config.record_experts
        num_slots = self.config.num_slots or fitting_slots(model, window, record_experts=records)
        self._cache = SlotCache(model, num_slots, window)
        if records:
            self._cache.record_experts(model)
        self._runner: SplitStep | None = None
        self._scheduler = Scheduler(self._cache, self.config.max_step_tokens, self.config.keep_idle_s)
        self._parameters = tuple(model.parameters())
        self._weights_mark = self._mark_weights()
        self._in_flight: dict[str, SamplingRequest] = {}
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._paused = self._closed = self._stopped = self._preparing = False
        is_small = sum(parameter.numel() for parameter in self._parameters) < _SMALL_MODEL
        on_cpu = model.embed.device.type == "cpu"
        self._threads = 1 if is_small else self.config.threads
        self._num_parts = (self.config.threads or usual_parts()) if is_small and on_cpu else 1
        can_compile = on_cpu and model.embed.dtype == torch.float32 and cpp_compiler() is not None
        if isinstance(model, TransformersModel):
            can_compile = can_compile and is_small and has_static_step(model) and self.config.compile is None
        self.compiles = can_compile or bool(self.config.compile)
        """True if the steps will run compiled, by what `prepare` or the first request makes."""
        self._worker = threading.Thread(target=self._work, name="agentgym-local-engine", daemon=True)
        self._worker.start()

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
        return self._version

    @property
    def num_steps(self) -> int:
        """The number of forward passes so far."""
        return self._num_steps

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Samples one reply; raises EngineError if it cannot (ids out of range, over the window, closed)."""
        prompt_T = checked_prompt(prompt_ids, sampling, self.vocab_size, self._window)
        if self._closed:
            raise EngineError(_CLOSED)
        if session in self._in_flight:
            raise EngineError(f"session {session!r} has a request in flight; one at a time, or name another session")
        loop = asyncio.get_running_loop()
        request = SamplingRequest(prompt_T, sampling, session, loop.create_future(), loop)
        self._in_flight[session] = request
        try:
            if not self._submit(lambda: self._scheduler.add(request)):
                raise EngineError(_CLOSED)
            return await request.future
        except asyncio.CancelledError:
            self._submit(lambda: self._cancel(request))
            raise
        finally:
            if self._in_flight.get(session) is request:
                del self._in_flight[session]

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Copies the weights, by their published names, and makes them version `version` from the next token on.

        Without any weights, the model's tensors were already changed. Raises EngineError if the version decreases, and
        for weights of another model.
        """
        if version < self._version:
            raise EngineError(f"policy versions never fall: the engine is at {self._version}, got {version}")
        started = time.perf_counter()
        if weights and self._weights_mark == _RELEASED:
            await self._command(lambda: regain_memory(self._parameters, self._cache))
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
        await self._command(lambda: self._abort(session))

    async def close(self) -> None:
        """Ends requests in flight with EngineError and waits for the worker thread; a second call does nothing.

        A compilation cannot be stopped and is not waited for: its thread is a daemon and ends after it.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()
        while self._worker.is_alive() and not self._preparing:
            await asyncio.sleep(_CLOSING_S)

    async def _command(self, act: Callable[[], None]) -> None:
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

        if self._submit(run):
            await done

    def record_experts(self) -> None:
        """Reports the experts of each token of a mixture from now on; tokens in the cache are computed again."""
        self._submit(self._record_experts)

    def _submit(self, act: Callable[[], object]) -> bool:
        with self._wake:
            if not self._stopped:
                self._inbox.append(act)
                self._wake.notify()
            return not self._stopped

    # Everything below runs on the worker thread only.

    def _work(self) -> None:
        device = self.model.embed.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # on which Triton launches its kernels
        elif self._threads is not None and device.type == "cpu":
            torch.set_num_threads(self._threads)
        while not self._closed:
            self._take_inbox()
            if self._paused or not (self._scheduler.active or self._scheduler.waiting):
                self._sleep(None)
            else:
                self._deliver(self._guarded_step())
        with self._wake:
            self._take_inbox()
            self._stopped = True
        self._deliver(self._fail_all(EngineError("it was closed")))
        if self._runner is not None:
            self._runner.close()

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _sleep(self, timeout_s: float | None) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closed, timeout_s)

    def _guarded_step(self) -> list[_Delivery]:
        try:
            self._prepare()
            self._scheduler.admit()
            if self._scheduler.active:
                return self._step()
        except Exception as error:  # noqa: BLE001  the one boundary: a failed step fails its requests, not the worker
            self._cache.erase()
            return self._fail_all(error)
        self._sleep(self._scheduler.patience_s())
        return []

    def _prepare(self) -> None:
        if self._runner is not None:
            return
        if self._closed:
            raise EngineError(_CLOSED)
        self._preparing = True
        try:
            self._runner = self._make_runner()
        finally:
            self._preparing = False

    def _make_runner(self) -> SplitStep:
        assert isinstance(self.model, Decoder | TransformersModel)
        if sum(parameter.nbytes for parameter in self._parameters) * _PACKED_PART <= total_memory():
            keep_packed(self._parameters)  # compiles the kernel, which may take long
        runner = make_step(self.model, self._cache, compiles=self.compiles, required=bool(self.config.compile))
        on_gpu = self.model.embed.device.type == "cuda"
        for finding in [_GPU_PRODUCTS] if on_gpu else batch_invariance_findings(runner):
            _log.warning("replies may depend on what else is in flight: %s", finding)
        return SplitStep(runner, self._num_parts)

    @torch.inference_mode()
    def _step(self) -> list[_Delivery]:
        scheduler = self._scheduler
        if self._mark_weights() != self._weights_mark:
            raise EngineError(
                f"the weights changed under version {self._version} without update_weights; call pause, change them,"
                " update_weights({}, version), resume"
            )
        rows = scheduler.plan()
        assert self._runner is not None
        logits_RV = self._runner.forward(rows)
        self._num_steps += 1
        slot_R = rows.slot_N[rows.wanted_R]
        ids, logprobs = self._draw(logits_RV, slot_R)
        ended = scheduler.commit(rows, ids, logprobs, self._version)
        return [(request, scheduler.completion(request)) for request in ended]

    def _draw(
        self, logits_RV: torch.Tensor, slot_R: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        scheduler = self._scheduler
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
            raise EngineError(f"the logits are not finite: the weights of version {self._version} have diverged")
        return id_R.cpu().numpy(), logprobs

    def _fail_all(self, cause: Exception) -> list[_Delivery]:
        failed = [*self._scheduler.active.values(), *self._scheduler.waiting.values()]
        deliveries: list[_Delivery] = []
        for request in failed:
            self._scheduler.end(request)
            error = EngineError(f"the local engine failed with {len(failed)} requests in flight: {cause}")
            error.__cause__ = cause
            deliveries.append((request, error))
        return deliveries

    def _deliver(self, deliveries: list[_Delivery]) -> None:
        for loop, group in itertools.groupby(deliveries, key=lambda delivery: delivery[0].loop):
            results = [(request.future, result) for request, result in group]
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, results)

    @torch.no_grad()
    def _renew(self, version: int, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for own, new in tensors:
            own.copy_(new)
        forget_packed(self._parameters)
        self._version, self._weights_mark = version, self._mark_weights()
        self._scheduler.restart()

    def _record_experts(self) -> None:
        self._cache.record_experts(self.model)
        self._scheduler.restart()

    def _release(self) -> None:
        forget_packed(self._parameters, free=True)
        if self._runner is not None:
            self._runner.forget()
        release_memory(self._parameters, self._cache)
        self._weights_mark = _RELEASED

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _abort(self, session: str) -> None:
        request = self._in_flight.get(session)
        if request is not None and not self._is_over(request):
            completion = self._scheduler.completion(request, "abort")
            self._scheduler.end(request)
            self._deliver([(request, completion)])
        self._cache.release(session)

    def _cancel(self, request: SamplingRequest) -> None:
        if not self._is_over(request):
            self._scheduler.end(request)

    def _is_over(self, request: SamplingRequest) -> bool:
        if request.slot < 0:
            return self._scheduler.waiting.get(request.session) is not request
        return self._scheduler.active.get(request.slot) is not request

    def _mark_weights(self) -> int:
        """Counts in-place changes of the parameters (autograd keeps the count), to detect a forgotten update."""
        return sum(parameter._version for parameter in self._parameters)


def _settle(done: asyncio.Future[None], failure: EngineError | None) -> None:
    if done.done():  # the task that waited may have been cancelled meanwhile
        return
    if failure:
        done.set_exception(failure)
    else:
        done.set_result(None)


def _resolve(results: list[tuple[asyncio.Future[Completion], Completion | EngineError]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)
