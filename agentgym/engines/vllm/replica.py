"""One vLLM engine: requests, commands, and new weights that are verified to have arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.servers.http import HttpUnreachable
from agentgym.engines.servers.serving_settings import EngineServing, PauseMode
from agentgym.engines.servers.sleep import ServerSleep
from agentgym.engines.vllm.api import Holding, VllmTransport, read_vllm_completion, sampling_params
from agentgym.engines.vllm.weight_sync import VllmSync, read_layout
from agentgym.errors import EngineError
from agentgym.model.published_weights import LoraWeights, Weights

__all__ = ["VllmReplica"]

_log = logging.getLogger(__name__)
_HOLDING: dict[PauseMode, Holding] = {"abort": "abort", "retract": "preempt", "in_place": "keep"}


class VllmReplica:
    """A `Replica` that is a vLLM engine; `VllmReplica.connect` makes one and asks for its settings first.

    The pause modes are vLLM's: `abort` is its mode `abort`; `in_place` is `keep`; `retract` is `keep` with the cache
    cleared, which preempts what runs, so that its prefix is recomputed. vLLM itself reports the weights of each id.
    """

    def __init__(self, transport: VllmTransport, sync: VllmSync, settings: EngineServing) -> None:
        self.transport = transport
        self.sync = sync
        self.settings = settings
        self._paused = False
        self._fault = ""
        self._num_updates = 0
        self._sleep = ServerSleep(transport.sleep, transport.wake, parts=("weights", "kv_cache"))

    @staticmethod
    async def connect(transport: VllmTransport, settings: EngineServing, version: int) -> VllmReplica:
        """Returns the replica of `transport`, whose weights are from now on called `version`.

        Raises EngineError if it is not a vLLM engine with our worker extension.
        """
        sync = VllmSync(transport, await read_layout(transport), settings.sync, settings.bucket_mb * 1_000_000)
        if not sync.layout.seeds:
            _log.warning(
                "%s reads prompts in chunks on CPU, where seeds end it: requests are sent without, and replies are not"
                " reproducible; start it with --no-enable-chunked-prefill",
                transport.name,
            )
        await transport.set_version(str(version))
        return VllmReplica(transport, sync, settings)

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return self.transport.name

    @property
    def dtype(self) -> str:
        """The dtype of its weights."""
        return self.sync.layout.dtype

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, version: int) -> Completion:
        """Samples one reply."""
        if self._fault:
            raise EngineError(f"{self.name} holds half of an update: {self._fault}. Update its weights again")
        params = sampling_params(sampling)
        if not self.sync.layout.seeds:
            del params["seed"]
        num_updates = self._num_updates
        # The prefix cache is separated by update: what older weights left there is never read.
        salt = f"v{version}.{num_updates}"
        with self._sleep.request():
            reply = await self.transport.generate(prompt_ids, params, rid=rid, cache_salt=salt)
        if reply.finish_reason is None and num_updates != self._num_updates:
            raise HttpUnreachable(f"{self.name} died over a weight update: the versions of what it sampled are unknown")
        return read_vllm_completion(reply, name=self.name, num_prompt_ids=len(prompt_ids), version=version)

    async def abort(self, rid: str | None) -> None:
        """Ends the request `rid`, or all of them."""
        await self.transport.abort(rid)

    async def is_alive(self) -> bool:
        """Returns whether the engine answers at all."""
        return await self.transport.is_alive()

    async def pause(self) -> None:
        """Stops sampling at a token boundary, in the mode of the settings; it may sleep then."""
        await self._hold()
        self._paused = True
        if self.settings.sleep and self.sync.layout.device != "cpu":
            await self._sleep.begin()

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self._sleep.end()
        await self.transport.resume()
        self._paused = False

    async def flush(self) -> None:
        """Empties the prefix cache; raises EngineError if requests in flight prevent it."""
        if not await self.transport.reset_prefix_cache(preempt=False):
            raise EngineError(f"{self.name} cannot empty its cache while requests are in flight: pause it first")

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Loads and checks new weights, paused.

        The prefix cache is emptied with them; if requests keep theirs in place, only the salt separates old from new.
        """
        from agentgym.engines.weights.buckets import checked_weights  # imported here because only this needs torch

        if isinstance(weights, LoraWeights):
            raise EngineError("the vllm engine takes whole weights: merge the adapter into the tensors it belongs to")
        await self._sleep.end("weights")
        started = time.perf_counter()
        tensors = self.sync.wanted_tensors(checked_weights(weights))
        gather_s = time.perf_counter() - started
        await self._hold()  # a second time is harmless, and reaches a server that was restarted
        self._fault = f"version {version} did not arrive whole"
        report = await self.sync.load(tensors, version)
        loaded = time.perf_counter()
        checksum = await self.sync.verify(tensors, version) if self.settings.verify_sync else ""
        await self._renew(version)
        self._fault = ""
        if not self._paused:
            await self.transport.resume()
        load_s = report.load_s + time.perf_counter() - loaded
        return replace(report, checksum=checksum, gather_s=report.gather_s + gather_s, load_s=load_s)

    async def close(self) -> None:
        """Disconnects from the engine, and ends it if it was started for us."""
        await self.sync.close()
        await self.transport.close()

    async def _hold(self) -> None:
        await self.transport.pause(_HOLDING[self.settings.pause])

    async def _renew(self, version: int) -> None:
        in_place = self.settings.pause == "in_place"
        if not await self.transport.reset_prefix_cache(preempt=not in_place) and not in_place:
            raise EngineError(f"{self.name} did not empty its prefix cache: it would answer from the old weights")
        self._num_updates += 1
        await self.transport.set_version(str(version))
        if (theirs := await self.transport.version()) != str(version):
            raise EngineError(f"stale weights: {self.name} says it samples from version {theirs!r}, not {version}")
