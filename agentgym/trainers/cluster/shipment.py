"""The facts about a version of the weights in the cluster's object store; `weight_store.py` stores and reads them.

Needs no torch, since the board keeps shipments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentgym.trainers.cluster.actors import Parcel

__all__ = ["Bucket", "Shipment"]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tensors that are stored and sent as one object."""

    names: tuple[str, ...]
    """The published names of the parameters."""
    num_bytes: int
    parcel: Parcel
    """Their bytes, the name of their type in torch, and their shape, by name."""


@dataclass(frozen=True, eq=False)
class Shipment:
    """All weights of a version; they exist as long as the process that stored them keeps this."""

    buckets: tuple[Bucket, ...]
    digests: Mapping[str, str]
    """The digest of each parameter, by the name that a server gives it."""
    gather_s: float
    """The seconds that gathering and storing took."""
