"""The process group over which an engine gets weights by broadcast."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["JOIN_S", "GroupAddress"]

JOIN_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAddress:
    """The process group that an engine's ranks join, of which the trainer is rank 0.

    Example: `GroupAddress(address="127.0.0.1", port=29500, num_ranks=2, name="agentgym-1f", backend="gloo")`.
    """

    address: str
    """The address of the store at which all ranks meet, with its `port`."""
    port: int
    num_ranks: int
    """The number of ranks, including the trainer's."""
    name: str
    backend: str
    """The backend, `nccl` or `gloo`."""
    timeout_s: float = JOIN_S
