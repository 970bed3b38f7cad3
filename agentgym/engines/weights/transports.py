"""The ways by which weights travel to an engine in another process: in messages, through a folder, by broadcast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol, TypeAlias

from agentgym.engines.protocol import WeightSync
from agentgym.engines.weights.group_address import GroupAddress
from agentgym.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from agentgym.engines.weights.broadcast import WeightBroadcast

__all__ = ["Receiver", "UpdateEnd", "WeightPath", "weight_path"]


@dataclass(frozen=True, slots=True)
class UpdateEnd:
    """The content of an update's last message besides its tensors: `UpdateEnd(3, flush=True)`."""

    version: int
    """The policy version of the weights from then on."""
    flush: bool
    """True if the prefix cache is emptied with it."""


class Receiver(Protocol):
    """An engine that takes weights. Methods raise EngineError; `end` is None in all but the last message of an update.

    `take` and `receive` are called while an `update` is open; what `read` does is an update of its own.
    """

    @property
    def num_ranks(self) -> int:
        """The number of processes that hold the model, or a share of it."""

    def update(self) -> AbstractAsyncContextManager[None]:
        """Returns an update: opened when entered, and closed when left, also if it failed."""

    async def take(self, tensors: Mapping[str, Tensor], end: UpdateEnd | None) -> None:
        """Copies the tensors of a bucket, by published name."""

    async def read(self, folder: str, end: UpdateEnd) -> None:
        """Reads the safetensors files of a folder."""

    async def join(self, invitation: GroupAddress) -> None:
        """Has each rank join a group, in which the engine's first one is rank 1."""

    async def receive(self, tensors: Mapping[str, Tensor], group: str, end: UpdateEnd | None) -> None:
        """Has each rank take part in broadcasts of tensors of such names, shapes and dtypes, in their order."""

    async def leave(self, group: str) -> None:
        """Has each rank leave the group."""


class _Memory:
    """Buckets of tensors in messages; on one GPU they hold handles of its memory (untested there for vLLM)."""

    def __init__(self, receiver: Receiver, max_bytes: int) -> None:
        self.receiver = receiver
        self.max_bytes = max_bytes

    async def load(self, weights: Mapping[str, Tensor], end: UpdateEnd) -> WeightSync:
        from agentgym.engines.weights.buckets import portions

        started = time.perf_counter()
        await self._prepare(weights)
        prepared = time.perf_counter()
        num_sent = 0
        async with self.receiver.update():
            for part in portions(weights, self.max_bytes):
                num_sent += len(part)
                await self._send(part, end if num_sent == len(weights) else None)
            transferred = time.perf_counter()
        return WeightSync(
            version=end.version,
            num_tensors=len(weights),
            num_bytes=sum(tensor.nbytes for tensor in weights.values()),
            gather_s=prepared - started,
            transfer_s=transferred - prepared,
            load_s=time.perf_counter() - transferred,
        )

    async def close(self) -> None:
        """Does nothing: nothing is kept."""

    async def _prepare(self, weights: Mapping[str, Tensor]) -> None:
        """Does nothing: a message needs no preparation."""

    async def _send(self, part: Mapping[str, Tensor], end: UpdateEnd | None) -> None:
        await self.receiver.take(part, end)


class _Disk:
    """A safetensors file in a temporary folder, which the engine reads."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    async def load(self, weights: Mapping[str, Tensor], end: UpdateEnd) -> WeightSync:
        from agentgym.engines.weights.file import write_weight_file

        started = time.perf_counter()
        with TemporaryDirectory(prefix="agentgym-weights-") as folder:
            num_bytes = write_weight_file(weights, folder)
            written = time.perf_counter()
            await self.receiver.read(folder, end)
        return WeightSync(
            version=end.version,
            num_tensors=len(weights),
            num_bytes=num_bytes,
            gather_s=written - started,
            transfer_s=time.perf_counter() - written,
        )

    async def close(self) -> None:
        """Does nothing: nothing is kept."""


class _Broadcast(_Memory):
    """A process group of the trainer and the engine's ranks, which exists from the first update on."""

    _group: WeightBroadcast | None = None

    async def close(self) -> None:
        """Leaves the group, and has the engine leave it."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(EngineError):  # an engine that is gone has left it
                await self.receiver.leave(group.invitation.name)
            group.close()

    async def _prepare(self, weights: Mapping[str, Tensor]) -> None:
        from agentgym.engines.weights.broadcast import WeightBroadcast

        if self._group is not None:
            return
        backend = "nccl" if all(tensor.is_cuda for tensor in weights.values()) else "gloo"
        group = WeightBroadcast(1 + self.receiver.num_ranks, backend)
        try:
            await asyncio.gather(self.receiver.join(group.invitation), group.join())
        except BaseException:
            group.close()
            raise
        self._group = group

    async def _send(self, part: Mapping[str, Tensor], end: UpdateEnd | None) -> None:
        assert self._group is not None, "it was joined"
        order = self.receiver.receive(part, self._group.invitation.name, end)
        await asyncio.gather(order, self._group.share([tensor.contiguous() for tensor in part.values()]))


WeightPath: TypeAlias = _Memory | _Disk
"""A way to one engine: `load` sends weights and raises EngineError if the engine refuses, `close` leaves its group.

Modules that need torch are imported when there are weights, which is when torch is imported anyway.
"""


def weight_path(name: str, receiver: Receiver, max_bytes: int) -> WeightPath:
    """Returns the way called `memory`, `disk` or `broadcast`; messages hold at most `max_bytes` of tensors."""
    if name == "disk":
        return _Disk(receiver)
    return _Broadcast(receiver, max_bytes) if name == "broadcast" else _Memory(receiver, max_bytes)
