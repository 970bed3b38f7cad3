"""vLLM in this process: its `AsyncLLM` as one engine. The only file that imports vllm."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym.engines.servers.gpus import visible_gpus
from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable
from agentgym.engines.vllm.api import Holding, VllmReply
from agentgym.errors import ConfigError

__all__ = ["CPU_ENVIRONMENT", "EmbeddedVllm"]

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # how keys are split depends on the requests in flight, and logprobs on that
}
"""The variables of vLLM on a machine without a GPU."""
_EXTENSION = "agentgym.engines.vllm.worker_extension.WeightWorker"


class EmbeddedVllm:
    """A `VllmTransport` on an `AsyncLLM`, which ends with it."""

    def __init__(self, model_folder: Path, *, on_cpu: bool, arguments: Mapping[str, object]) -> None:
        """Loads the model; `arguments` are vLLM's `AsyncEngineArgs`. Raises ConfigError if vLLM is not installed."""
        if on_cpu:
            for name, value in CPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            cpu = {"enforce_eager": True, "enable_chunked_prefill": False, "gpu_memory_utilization": 0.2}
            arguments = {**cpu, **arguments}
        try:
            self._types = importlib.import_module("vllm")
            async_llm = importlib.import_module("vllm.v1.engine.async_llm")
        except ImportError as error:
            raise ConfigError(f"vLLM cannot be imported here ({error}): install it, or use its server") from error
        settings = self._types.AsyncEngineArgs(
            model=str(model_folder),
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            worker_extension_cls=_EXTENSION,
            disable_log_stats=True,
            **arguments,
        )
        self._llm: Any = async_llm.AsyncLLM.from_engine_args(settings)
        self.gpus: Sequence[str] = () if on_cpu else visible_gpus()
        """The GPUs that it sees, as this process does."""
        self._in_flight: set[str] = set()

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return "the vllm in this process"

    async def context_window(self) -> int:
        """Returns the most tokens that prompt and reply may have together."""
        return int(self._llm.model_config.max_model_len)

    async def generate(
        self, prompt_ids: Sequence[int], params: Mapping[str, object], *, rid: str, cache_salt: str
    ) -> VllmReply:
        """Samples one reply."""
        kind = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": cache_salt}
        sampling = self._types.SamplingParams(**params, output_kind=kind)
        self._in_flight.add(rid)
        try:
            async for output in self._llm.generate(prompt, sampling, rid):
                last = output
        except ValueError as error:
            raise HttpRefusal(f"{self.name} refused a request: {error}", 400) from error
        except importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError as error:
            raise HttpUnreachable(f"{self.name} is dead: {error}") from error
        finally:
            self._in_flight.discard(rid)
        return _reply(last)

    async def abort(self, rid: str | None) -> None:
        """Ends the request `rid`, or all of them."""
        await self._llm.abort(list(self._in_flight) if rid is None else rid)

    async def pause(self, holding: Holding) -> None:
        """Stops at a token boundary."""
        mode = "abort" if holding == "abort" else "keep"
        await self._llm.pause_generation(mode=mode, clear_cache=holding != "keep")

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self._llm.resume_generation()

    async def sleep(self) -> None:
        """Frees the GPU's memory."""
        await self._llm.sleep(1)

    async def wake(self, parts: Sequence[str]) -> None:
        """Takes memory back."""
        await self._llm.wake_up(list(parts))

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Drops cached prefixes."""
        return bool(await self._llm.reset_prefix_cache(preempt))

    async def set_version(self, version: str) -> None:
        """Names the weights."""
        await self._llm.update_weight_version(version)

    async def version(self) -> str:
        """Returns the name of the weights."""
        return str(await self._llm.get_weight_version())

    async def call(self, method: str, *args: str) -> list[Any]:
        """Returns each worker's answer."""
        return list(await self._llm.collective_rpc(method, args=args))

    async def is_alive(self) -> bool:
        """Returns whether its processes run."""
        return self._llm is not None and not self._llm.errored

    async def close(self) -> None:
        """Ends its processes; a second call does nothing."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)


def _reply(output: Any) -> VllmReply:
    """Returns vLLM's `RequestOutput` as the server would report it."""
    (choice,) = output.outputs
    ids = tuple(int(token) for token in choice.token_ids)
    entries = [entry.get(token) for token, entry in zip(ids, choice.logprobs or (), strict=False)]
    spans = choice.weight_versions
    return VllmReply(
        ids,
        tuple(token for token, entry in zip(ids, entries, strict=False) if entry is not None),
        tuple(float(entry.logprob) for entry in entries if entry is not None),
        choice.finish_reason,
        None if spans is None else [(str(span.version), int(span.start), int(span.end)) for span in spans],
        len(output.prompt_token_ids or ()),
    )
