"""Sends new weights to one SGLang engine, and verifies that they arrived."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from agentgym.engines.protocol import WeightSync
from agentgym.engines.servers.gpus import opens_handles
from agentgym.engines.servers.http import HttpRefusal
from agentgym.engines.servers.serving_settings import COMMAND_S, EngineServing
from agentgym.engines.sglang.api import SglangTransport
from agentgym.engines.sglang.receiver import SglangReceiver
from agentgym.engines.weights.check import WeightCheck
from agentgym.engines.weights.transports import UpdateEnd, weight_path
from agentgym.errors import EngineError
from agentgym.model.published_weights import LoraWeights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SglangSync"]

_log = logging.getLogger(__name__)


class SglangSync:
    """The weights of one engine, as far as the trainer knows them."""

    def __init__(self, server: SglangTransport, info: Mapping[str, Any], settings: EngineServing) -> None:
        self.server = server
        self.settings = settings
        self.dtype = str(info.get("dtype", "auto"))
        self.adapter: str | None = None
        """The name of the LoRA adapter that requests use."""
        num_ranks = int(info.get("tp_size", 1))
        opens = partial(opens_handles, server.gpus, server.name, num_ranks)
        receiver = SglangReceiver(self.order, num_ranks=num_ranks, opens=opens)
        self._path = weight_path(settings.sync, receiver, settings.bucket_mb * 1_000_000)
        self._check = WeightCheck(server.name, is_exact=info.get("device") == "cpu" and num_ranks == 1)
        self._prefix = f"policy-{secrets.token_hex(4)}"  # an earlier run may have left adapters
        self._old_adapters: list[str] = []
        self._errands: set[asyncio.Task[None]] = set()

    async def recover(self) -> None:
        """Ends the pause and the update that a dead trainer may have left; requests would wait forever."""
        with suppress(HttpRefusal):  # no update is open, as it should be
            await self.order("/end_weight_update", {})
        await self.order("/continue_generation", {})

    async def number(self, version: int) -> None:
        """Names the current weights `version`, without ending requests."""
        payload = {"new_version": str(version), "abort_all_requests": False}
        await self.order("/update_weight_version", payload)

    async def load(self, weights: Mapping[str, Tensor], version: int, *, flush: bool) -> WeightSync:
        """Sends all tensors to the engine as version `version`, and with `flush` empties its cache.

        Raises EngineError if the engine refuses.
        """
        return await self._path.load(weights, UpdateEnd(version, flush))

    async def load_adapter(self, weights: LoraWeights, version: int) -> WeightSync:
        """Sends an adapter, which later requests use; the engine itself compares each tensor's SHA-256.

        Requests in flight keep the adapter that they began with, and its version.
        """
        from agentgym.engines.weights.buckets import adapter_payload, checked_weights, overall_digest

        started = time.perf_counter()
        tensors = checked_weights(weights.tensors)
        payload, sums = adapter_payload(tensors)
        gathered = time.perf_counter()
        name = f"{self._prefix}-{version}"
        order = {
            "lora_name": name,
            "config_dict": dict(weights.config),
            "serialized_named_tensors": [base64.b64encode(payload).decode()],
            "expected_checksums": sums,
        }
        answer = await self.order("/load_lora_adapter_from_tensors", order)
        self.check_adapters(answer, name)
        if self.adapter is not None:
            self._old_adapters.append(self.adapter)
        self.adapter = name
        return WeightSync(
            version=version,
            checksum=overall_digest(sums),
            num_tensors=len(tensors),
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            gather_s=gathered - started,
            transfer_s=time.perf_counter() - gathered,
        )

    def unload_unused(self) -> None:
        """Unloads adapters that later requests do not use, in the background: the engine waits for their last one."""
        names, self._old_adapters = self._old_adapters, []
        for name in names:
            errand = asyncio.ensure_future(self._unload(name))
            self._errands.add(errand)
            errand.add_done_callback(self._errands.discard)

    async def close(self) -> None:
        """Ends background work, and leaves what was joined for updates."""
        await self._path.close()
        for errand in list(self._errands):
            errand.cancel()
        if self._errands:
            await asyncio.wait(self._errands)

    def check_adapters(self, answer: object, name: str) -> None:
        """Raises EngineError unless the engine reports that it has the adapter `name`."""
        loaded = answer.get("loaded_adapters") if isinstance(answer, dict) else None
        if name not in (loaded or {}):
            have = ", ".join(loaded or {}) or "none"
            raise EngineError(f"stale adapter: {self.server.name} has the adapters {have} after it was sent {name}")

    async def verify(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Returns the engine's own checksum of its parameters, after comparing them with what was sent.

        Raises EngineError that names the first tensor which did not arrive, or the version that did not.
        """
        from agentgym.engines.weights.buckets import overall_digest

        await self.verify_version(version)
        try:
            server_sums = await self._read_checksums()
        except HttpRefusal as error:
            raise EngineError(
                f"the update cannot be verified ({error}): is it a release of SGLang that is supported?"
            ) from error
        # What the engine keeps under another name (a head that equals the embedding) is not compared.
        own_sums = {name: digest for name, digest in self._digests(weights, server_sums).items() if name in server_sums}
        self._check.compare(own_sums, server_sums, version)
        return overall_digest(server_sums)

    def _digests(self, weights: Mapping[str, Tensor], theirs: Mapping[str, str]) -> dict[str, str]:
        """Returns the digests of what was sent, to compare with those that were found."""
        from agentgym.engines.weights.buckets import fused_digests, fused_sums, pad_vocabulary

        if not self._check.is_exact:
            return fused_sums(weights)
        wholes = {name: (tensor, pad_vocabulary(name, tensor)) for name, tensor in weights.items()}
        padded = fused_digests({name: whole for name, (tensor, whole) in wholes.items() if whole is not tensor})
        return fused_digests(weights) | {name: digest for name, digest in padded.items() if theirs.get(name) == digest}

    async def verify_version(self, version: int) -> None:
        """Raises EngineError if the engine reports that it samples from another version."""
        info = await self.server.get("/model_info", timeout_s=COMMAND_S)
        version_text = str(info.get("weight_version"))
        if version_text != str(version):
            raise EngineError(
                f"stale weights: {self.server.name} says it samples from version {version_text!r} after the update to"
                f" {version}: the update did not reach it"
            )

    async def order(self, path: str, payload: Mapping[str, object]) -> Any:
        """Returns the answer to a command; raises HttpRefusal if the engine reports that it failed."""
        answer = await self.server.post(path, payload, timeout_s=COMMAND_S)
        if isinstance(answer, dict) and answer.get("success") is False:
            message = answer.get("message") or answer.get("error_message")
            raise HttpRefusal(f"{self.server.name}{path}: {message}")
        return answer

    async def _unload(self, name: str) -> None:
        try:
            await self.order("/unload_lora_adapter", {"lora_name": name})
        except EngineError as error:
            _log.warning("adapter %s stays loaded: %s", name, error)

    async def _read_checksums(self) -> dict[str, str]:
        answer = await self.server.post("/weights_checker", {"action": "checksum"}, timeout_s=COMMAND_S)
        checksums: dict[str, str] = {}
        for number, rank in enumerate(answer.get("ranks") or ()):
            names = rank["checksums"]
            checksums |= (
                names if number == 0 else {f"{name} (rank {number})": checksum for name, checksum in names.items()}
            )
        if not checksums:
            raise HttpRefusal(f"{self.server.name} answers no checksums of its weights")
        return checksums
