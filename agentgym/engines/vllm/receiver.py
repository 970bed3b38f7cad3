"""The delivery of weights to a vLLM engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from agentgym.engines.servers.gpus import opens_handles
from agentgym.engines.vllm.api import VllmTransport
from agentgym.engines.weights.group_address import GroupAddress
from agentgym.engines.weights.transports import UpdateEnd

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VllmReceiver"]


class VllmReceiver:
    """A `Receiver` that is a vLLM engine: our extension of its workers does what is asked.

    The end of an update means nothing to them: separate commands set the engine's version and empty its cache.
    """

    def __init__(self, engine: VllmTransport, num_ranks: int) -> None:
        self.engine = engine
        self.num_ranks = num_ranks
        self._opens = partial(opens_handles, engine.gpus, engine.name, num_ranks)

    def update(self) -> AbstractAsyncContextManager[None]:
        """Returns an update, which needs no opening: the engine is paused."""
        return nullcontext()

    async def take(self, tensors: Mapping[str, Tensor], end: UpdateEnd | None) -> None:
        """Sends a bucket: its bytes, or handles of its memory on a GPU."""
        from agentgym.engines.weights.buckets import memory_handle, safetensors_bytes, sendable

        tensors = sendable(tensors, self._opens)
        if any(tensor.is_cuda for tensor in tensors.values()):
            handles = [[name, memory_handle(tensor)] for name, tensor in tensors.items()]
            await self.engine.call("agentgym_load_handles", json.dumps(handles))
        else:
            await self.engine.call("agentgym_load", base64.b64encode(safetensors_bytes(tensors)).decode())

    async def read(self, folder: str, end: UpdateEnd) -> None:
        """Has the workers read the folder."""
        await self.engine.call("agentgym_load_folder", folder)

    async def join(self, invitation: GroupAddress) -> None:
        """Has the workers join the group."""
        await self.engine.call("agentgym_join", json.dumps(asdict(invitation)))

    async def receive(self, tensors: Mapping[str, Tensor], group: str, end: UpdateEnd | None) -> None:
        """Has the workers receive the tensors."""
        manifest = [
            [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()
        ]
        await self.engine.call("agentgym_receive", json.dumps(manifest))

    async def leave(self, group: str) -> None:
        """Has the workers leave the group, the only one that they joined."""
        await self.engine.call("agentgym_leave")
