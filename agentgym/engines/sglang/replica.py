"""One SGLang engine: requests, commands, and new weights that are verified to have arrived."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable, check_token
from agentgym.engines.servers.serving_settings import COMMAND_S, EngineServing
from agentgym.engines.servers.sleep import ServerSleep
from agentgym.engines.sglang.api import SglangTransport, generate_payload, read_experts, read_sglang_completion
from agentgym.engines.sglang.weight_sync import SglangSync
from agentgym.errors import EngineError
from agentgym.model.published_weights import LoraWeights, Weights

__all__ = ["OLDEST_RELEASE", "SglangReplica"]

_log = logging.getLogger(__name__)
OLDEST_RELEASE = "0.5.23"
"""The oldest SGLang that is supported: the release that the tests run."""
_PARTS = ("weights", "kv_cache", "cuda_graph")
"""The kinds of memory that SGLang's memory saver releases."""


class SglangReplica:
    """A `Replica` that is an SGLang engine; `SglangReplica.connect` makes one and asks for its settings first."""

    def __init__(self, transport: SglangTransport, sync: SglangSync, settings: EngineServing) -> None:
        self.transport = transport
        self.sync = sync
        self.settings = settings
        self.context_window: int | None = None
        """The tokens that prompt and reply may have together, from the length of the longest prompt that it accepts.

        It is a little less than the model's context, or what its cache has room for.
        """
        self.expert_shape: tuple[int, int] | None = None
        """The number of layers, and of experts of a token, where experts are recorded."""
        self.model_path = ""
        """The folder or name of the model that the server loaded."""
        self._sleep = ServerSleep(self._release_memory, self._regain_memory, parts=_PARTS)

    @staticmethod
    async def connect(transport: SglangTransport, settings: EngineServing, version: int) -> SglangReplica:
        """Returns the replica of `transport`, whose weights are from now on called `version`.

        Raises EngineError if it is not an SGLang engine of a supported release.
        """
        try:
            info = await transport.get("/server_info", timeout_s=60.0)
        except HttpUnreachable as error:
            raise EngineError(f"no server answers at {transport.name}: {error}") from error
        except HttpRefusal as error:
            check_token(error, transport.name)
            raise EngineError(f"{transport.name} is not an SGLang server: {error}") from error
        if not isinstance(info, dict) or "version" not in info:
            raise EngineError(f"{transport.name} is not an SGLang server: /server_info gave {str(info)[:80]!r}")
        check_release(transport.name, str(info["version"]))
        replica = SglangReplica(transport, SglangSync(transport, info, settings), settings)
        lengths = (info.get("context_length"), info.get("max_req_input_len"))
        replica.context_window = min((length for length in lengths if length), default=None)
        replica.model_path = str(info.get("model_path") or "")
        if settings.sleep and info.get("device") == "cuda" and not info.get("enable_memory_saver"):
            raise EngineError(
                f"{transport.name} cannot sleep: start it with --enable-memory-saver --enable-weights-cpu-backup"
            )
        await replica.sync.recover()
        await replica.sync.number(version)
        return replica

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return self.transport.name

    @property
    def dtype(self) -> str:
        """The dtype of its weights, as the server names it."""
        return self.sync.dtype

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, version: int) -> Completion:
        """Samples one reply, in one answer or as a stream."""
        # The prefix cache is separated by policy version: what older weights left there is never read.
        adapter = self.sync.adapter
        payload = generate_payload(prompt_ids, sampling, rid=rid, cache_key=f"v{version}", lora=adapter)
        payload |= {"return_routed_experts": True} if self.expert_shape else {}
        with self._sleep.request():
            if self.settings.stream:
                answer = await self._read_stream(payload)
            else:
                answer = await self.transport.post("/generate", payload, timeout_s=self.settings.request_s)
        completion = read_sglang_completion(
            answer,
            name=self.name,
            num_prompt_ids=len(prompt_ids),
            version=version,
            one_version=adapter is not None,
        )
        if self.settings.pause == "in_place" and completion.ids and completion.policy_versions[0] > version:
            # It was in flight when the weights changed, and read a cache that was not emptied: it is requested again.
            return Completion((), (), (), "abort")
        if self.expert_shape:
            num_tokens = len(prompt_ids) + len(completion.ids) - 1
            experts = read_experts(answer, self.expert_shape, num_tokens, name=self.name)
            return replace(completion, experts=experts)
        return completion

    async def abort(self, rid: str | None) -> None:
        """Ends the request `rid`, or all of them."""
        await self._order("/abort_request", {"rid": rid or "", "abort_all": rid is None})

    async def is_alive(self) -> bool:
        """Returns whether the server answers at all."""
        try:
            await self.transport.get("/model_info", timeout_s=5.0)
        except (HttpUnreachable, HttpRefusal):
            return False
        return True

    async def pause(self) -> None:
        """Stops sampling at a token boundary, in the mode of the settings; it may sleep then."""
        await self._order("/pause_generation", {"mode": self.settings.pause})
        if self.settings.sleep:
            await self._sleep.begin()

    async def resume(self) -> None:
        """Continues; adapters that are out of use are unloaded meanwhile, each when its last request has ended."""
        await self._sleep.end()
        await self._order("/continue_generation", {})
        self.sync.unload_unused()

    async def flush(self) -> None:
        """Empties the prefix cache."""
        await self._order("/flush_cache", {})

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Loads and checks new weights.

        The cache is emptied with them, except if requests may keep theirs in place: then only the cache key separates
        old and new.
        """
        from agentgym.engines.weights.buckets import (  # imported here because only this needs torch
            as_dtype,
            checked_weights,
        )

        await self._sleep.end("weights")
        if isinstance(weights, LoraWeights):
            return await self.sync.load_adapter(weights, version)
        started = time.perf_counter()
        tensors = as_dtype(checked_weights(weights), self.sync.dtype)
        gathered = time.perf_counter()
        flush = self.settings.pause != "in_place"
        report = await self.sync.load(tensors, version, flush=flush)
        loaded = time.perf_counter()
        checksum = await self.sync.verify(tensors, version) if self.settings.verify_sync else ""
        load_s = report.load_s + time.perf_counter() - loaded
        return replace(report, checksum=checksum, gather_s=report.gather_s + gathered - started, load_s=load_s)

    async def close(self) -> None:
        """Disconnects from the server, and ends it if it was started for us."""
        await self.sync.close()
        await self.transport.close()

    async def _release_memory(self) -> None:
        await self._order("/release_memory_occupation", {"tags": _PARTS})

    async def _regain_memory(self, parts: Sequence[str]) -> None:
        await self._order("/resume_memory_occupation", {"tags": parts})

    async def _order(self, path: str, payload: dict[str, object]) -> None:
        await self.transport.post(path, payload, timeout_s=COMMAND_S)

    async def _read_stream(self, payload: dict[str, object]) -> Any:
        """Returns the last piece of a streamed answer, which holds the whole, or the last before the server died."""
        last: Any = None
        try:
            timeout_s = self.settings.request_s
            async for piece in self.transport.stream("/generate", {**payload, "stream": True}, timeout_s=timeout_s):
                last = piece
        except HttpUnreachable:
            if last is None:
                raise
            with suppress(TypeError, KeyError):  # another form: read_sglang_completion reports it
                last["meta_info"]["finish_reason"] = None
            return last
        if last is None:
            raise HttpUnreachable(f"{self.name} closed the stream before anything came")
        return last


def check_release(name: str, release: str) -> None:
    """Raises EngineError if the server `name` runs a release of SGLang that is too old."""
    numbers = version_numbers(release)
    if not any(numbers):  # SGLang built from a copy of its sources without tags is 0.0.0.dev0
        _log.warning("%s runs SGLang %s, which names no release: %s or later is needed", name, release, OLDEST_RELEASE)
    elif numbers < version_numbers(OLDEST_RELEASE):
        raise EngineError(f"{name} runs SGLang {release}, and {OLDEST_RELEASE} or later is needed: update it")


def version_numbers(text: str) -> tuple[int, ...]:
    """Returns a version as numbers that compare: `0.5.23rc1` is (0, 5, 23)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
