"""Stored weights by broadcast: rank 0 of the learner sends them to all engines on other nodes at once.

Ray's object store gives them to one node after the other over TCP. NCCL, or Gloo without GPUs, takes the network that
the ranks' own collectives take. A bucket is on a GPU at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.weights.broadcast import WeightBroadcast
from agentgym.engines.weights.invitation import Invitation
from agentgym.trainers.cluster.actors import own_address
from agentgym.trainers.cluster.shipment import Bucket, Seat, Shipment

__all__ = ["BucketListener", "BucketSender", "as_tensor"]

Arrays: TypeAlias = "list[NDArray[Any]]"


class _Member:
    """A process in the group, which is joined with the first broadcast and left after a failed one."""

    _group: WeightBroadcast | None = None
    _has_joined = False

    async def _share(self, group: WeightBroadcast, tensors: Sequence[Tensor]) -> None:
        try:
            if not self._has_joined:
                await group.join()
                self._has_joined = True
            await group.share(tensors)
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
        self._on_gpu = on_gpu

    def invite(self, num_ranks: int) -> Invitation:
        """Begins a new group of so many ranks, this one included, and leaves the one before."""
        self._leave()
        self._group = WeightBroadcast.begin(num_ranks, "nccl" if self._on_gpu else "gloo", own_address())
        return self._group.invitation

    async def send(self, shipment: Shipment) -> None:
        """Sends all buckets; raises EngineError if another rank does not join, or is gone."""
        for bucket in shipment.buckets:
            assert self._group is not None, "others were invited"
            tensor = as_tensor(bucket.parcel.take())
            await self._share(self._group, [tensor.cuda() if self._on_gpu else tensor])


@dataclass
class BucketListener(_Member):
    """An engine on another node. Its memory for weights is that of the broadcast before."""

    def __post_init__(self) -> None:
        self._arrays: Arrays = []

    @property
    def group_name(self) -> str | None:
        """The group that this process is in."""
        return None if self._group is None else self._group.invitation.name

    async def receive(self, shipment: Shipment, seat: Seat) -> Arrays:
        """Returns the bytes of all buckets, until the next call; raises EngineError if they do not arrive."""
        if self.group_name != seat.invitation.name:
            self._leave()
            self._group = WeightBroadcast(seat.invitation, seat.rank)
        sizes = [_size_of(bucket) for bucket in shipment.buckets]
        if [len(array) for array in self._arrays] != sizes:
            self._arrays = [np.empty(size, np.uint8) for size in sizes]
        device = "cuda" if seat.invitation.backend == "nccl" else "cpu"
        for array in self._arrays:
            memory = torch.from_numpy(array)
            tensor = memory if device == "cpu" else torch.empty_like(memory, device=device)
            assert self._group is not None
            await self._share(self._group, [tensor])
            memory.copy_(tensor)
        return self._arrays


def _size_of(bucket: Bucket) -> int:
    return bucket.tensors[-1].start + bucket.tensors[-1].num_bytes


def as_tensor(packed: NDArray[Any]) -> Tensor:
    """Returns bytes, which may be those of the object store, as a tensor that is not to be changed then."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(packed)
