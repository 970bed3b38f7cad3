"""The delivery of weights to an SGLang engine."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agentgym.engines.servers.http import HttpRefusal
from agentgym.engines.weights.group_address import GroupAddress
from agentgym.engines.weights.transports import UpdateEnd

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SglangReceiver"]


class SglangReceiver:
    """A `Receiver` that is an SGLang engine.

    `order` returns the answer of an endpoint and raises HttpRefusal and HttpUnreachable. `opens` tells whether it can
    open handles of the memory of a GPU, which is named by its index in this process.
    """

    def __init__(
        self,
        order: Callable[[str, Mapping[str, object]], Awaitable[Any]],
        *,
        num_ranks: int,
        opens: Callable[[int], bool],
    ) -> None:
        self.order = order
        self.opens = opens
        self.num_ranks = num_ranks

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Opens an update; one that was left open, because a connection broke, is closed first."""
        try:
            await self.order("/begin_weight_update", {})
        except HttpRefusal:
            await self.order("/end_weight_update", {})
            await self.order("/begin_weight_update", {})
        try:
            yield
        finally:
            await self.order("/end_weight_update", {})

    async def take(self, tensors: Mapping[str, Tensor], end: UpdateEnd | None) -> None:
        """Sends a bucket, once for each rank, as the pickle that SGLang reads."""
        from agentgym.engines.weights.buckets import pickled_tensors, sendable

        copies = [base64.b64encode(pickled_tensors(sendable(tensors, self.opens))).decode()] * self.num_ranks
        await self._send("/update_weights_from_tensor", {"serialized_named_tensors": copies}, end)

    async def read(self, folder: str, end: UpdateEnd) -> None:
        """Has the engine read the folder."""
        await self._send("/update_weights_from_disk", {"model_path": folder}, end)

    async def join(self, invitation: GroupAddress) -> None:
        """Has the ranks join the group."""
        payload = {
            "master_address": invitation.address,
            "master_port": invitation.port,
            "rank_offset": 1,
            "world_size": invitation.num_ranks,
            "group_name": invitation.name,
            "backend": invitation.backend,
        }
        await self.order("/init_weights_update_group", payload)

    async def receive(self, tensors: Mapping[str, Tensor], group: str, end: UpdateEnd | None) -> None:
        """Has the ranks receive the tensors."""
        payload = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": group,
        }
        await self._send("/update_weights_from_distributed", payload, end)

    async def leave(self, group: str) -> None:
        """Has the ranks leave the group."""
        await self.order("/destroy_weights_update_group", {"group_name": group})

    async def _send(self, path: str, payload: Mapping[str, object], end: UpdateEnd | None) -> None:
        options: dict[str, object] = {"flush_cache": end is not None and end.flush}
        if end is not None:
            options["weight_version"] = str(end.version)
        await self.order(path, {**payload, **options})
