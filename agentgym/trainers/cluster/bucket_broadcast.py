"""Stored weights by broadcast: rank 0 of the learner sends them to all engines on other nodes at once.

Ray's object store gives them to one node after the other over TCP. NCCL, or Gloo without GPUs, takes the network that
the ranks' own collectives take. A bucket is on a GPU at a time.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.weights.broadcast import WeightBroadcast
from agentgym.engines.weights.group_address import GroupAddress
from agentgym.trainers.cluster.actors import own_address
from agentgym.trainers.cluster.shipment import Bucket, Seat, Shipment

__all__ = ["BucketListener", "BucketSender", "as_tensor"]


class _Member:
    """A process in the group, which it joins with the first broadcast and leaves after a failed one."""

    def __init__(self) -> None:
        self._group: WeightBroadcast | None = None
        self._has_joined = False

    def _enter(self, group: WeightBroadcast) -> None:
        self._leave()
        self._group = group

    async def _share(self, tensor: Tensor) -> None:
        group = self._group
        assert group is not None, "it was entered"
        try:
            if not self._has_joined:
                await group.join()
                self._has_joined = True
            await group.share([tensor])
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        group, self._group, self._has_joined = self._group, None, False
        if group is not None:
            group.close()


class BucketSender(_Member):
    """Rank 0 of the learner, which has stored the weights."""

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__()
        self._backend = "nccl" if on_gpu else "gloo"

    def invite(self, num_ranks: int) -> GroupAddress:
        """Begins a new group of so many ranks, this one included, and leaves the one before."""
        group = WeightBroadcast.begin(num_ranks, self._backend, own_address())
        self._enter(group)
        return group.invitation

    async def send(self, shipment: Shipment) -> None:
        """Sends all buckets; raises EngineError if another rank does not join, or is gone."""
        for bucket in shipment.buckets:
            tensor = as_tensor(bucket.parcel.take())
            await self._share(tensor.cuda() if self._backend == "nccl" else tensor)


class BucketListener(_Member):
    """An engine on another node. Its memory for weights is that of the broadcast before."""

    def __init__(self) -> None:
        super().__init__()
        self._arrays: list[NDArray[Any]] = []

    @property
    def group_name(self) -> str | None:
        """The group that this process is in."""
        return None if self._group is None else self._group.invitation.name

    async def receive(self, shipment: Shipment, seat: Seat) -> list[NDArray[Any]]:
        """Returns the bytes of all buckets, until the next call; raises EngineError if they do not arrive."""
        if self.group_name != seat.invitation.name:
            self._enter(WeightBroadcast(seat.invitation, seat.rank))
        sizes = [_size_of(bucket) for bucket in shipment.buckets]
        if [len(array) for array in self._arrays] != sizes:
            self._arrays = [np.empty(size, np.uint8) for size in sizes]
        device = "cuda" if seat.invitation.backend == "nccl" else "cpu"
        for memory in map(torch.from_numpy, self._arrays):
            tensor = memory if device == "cpu" else torch.empty_like(memory, device=device)
            await self._share(tensor)
            memory.copy_(tensor)
        return self._arrays


def _size_of(bucket: Bucket) -> int:
    return bucket.tensors[-1].start + bucket.tensors[-1].num_bytes


def as_tensor(packed: NDArray[Any]) -> Tensor:
    """Returns bytes, which may be those of the object store, as a tensor that is not to be changed then."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(packed)
