"""The protocol of a source of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentgym.trajectory import Trajectory

__all__ = ["RewardSource"]


class RewardSource(Protocol):
    """Computes a value for each episode: a function, a pool of processes, a server, a judge, a model."""

    @property
    def together(self) -> bool:
        """True if the episodes of a step are scored in one call; otherwise each call has one."""

    @property
    def num_at_once(self) -> int:
        """The number of calls that may run at the same time."""

    async def score(self, trajectories: Sequence[Trajectory]) -> Sequence[object]:
        """Returns a value for `read_reward`, or a RewardFailure, per episode; raises RewardFailure if all of them fail.

        Raises ConfigError for a fault that every other episode would have too; it ends the run.
        """

    async def close(self) -> None:
        """Releases its resources; a second call does nothing."""
