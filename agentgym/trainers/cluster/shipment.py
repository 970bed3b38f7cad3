"""The facts about a version of the weights in the cluster's object store; `weight_store.py` stores and reads them.

Needs no torch, since the board keeps shipments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentgym.trainers.cluster.actors import Parcel

__all__ = ["Bucket", "PackedTensor", "Shipment"]


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
class Bucket:
    """Tensors that are stored and sent as one array of bytes."""

    tensors: tuple[PackedTensor, ...]
    parcel: Parcel


@dataclass(frozen=True, eq=False)
class Shipment:
    """All weights of a version; they exist as long as the process that stored them keeps this."""

    buckets: tuple[Bucket, ...]
    digests: Mapping[str, str]
    """The digest of each parameter, by the name that a server gives it."""
    gather_s: float
    """The seconds that gathering and storing took."""
