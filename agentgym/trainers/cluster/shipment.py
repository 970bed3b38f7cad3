"""The facts about a version of the weights in the cluster's object store; `weight_store.py` stores and reads them.

Needs no torch, since the board keeps shipments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentgym.engines.weights.group_address import GroupAddress
from agentgym.trainers.cluster.actors import Parcel

__all__ = ["Bucket", "Delta", "PackedTensor", "Seat", "Shipment"]


@dataclass(frozen=True)
class PackedTensor:
    """The position of a tensor in the bytes of its bucket."""

    name: str
    """The published name of the parameter."""
    dtype: str
    """The type by its name in torch, such as `bfloat16`."""
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Delta:
    """The elements of a bucket that changed since the shipment before: their places (uint32), then their bits."""

    parcel: Parcel
    element_bytes: int
    """The bytes of an element; of the smallest type, if there are several."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tensors that are stored and sent as one array of bytes."""

    tensors: tuple[PackedTensor, ...]
    parcel: Parcel
    delta: Delta | None = None
    """The change since the shipment before, if there was one and the change is much smaller than the bucket."""


@dataclass(frozen=True, eq=False)
class Shipment:
    """All weights of a version; they exist as long as the process that stored them keeps this."""

    buckets: tuple[Bucket, ...]
    digests: Mapping[str, str]
    """The digest of each parameter, by the name that a server gives it."""
    gather_s: float
    """The seconds that gathering and storing took."""
    node: str
    """The node that has them in its object store."""
    name: str | None = None
    """The name under which the next shipment refers to this one, if it is to have deltas."""
    base: str | None = None
    """The name of the shipment that the deltas are the changes of."""


@dataclass(frozen=True, eq=False)
class Seat:
    """An engine's place in the group to which rank 0 of the learner broadcasts weights."""

    invitation: GroupAddress
    rank: int
