"""What rewards come from, as those who apply them see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentgym.trajectory import Trajectory

__all__ = ["RewardSource"]


class RewardSource(Protocol):
    """Gives a value for each episode: a function, a pool of processes, a server, a judge, a model."""

    @property
    def together(self) -> bool:
        """Whether the episodes of a step are scored in one call; otherwise each call has one."""

    @property
    def num_at_once(self) -> int:
        """Calls that may run at the same time."""

    async def score(self, trajectories: Sequence[Trajectory]) -> Sequence[object]:
        """What `read_reward` reads, or a RewardFailure, for each episode; raises RewardFailure where all of them fail.

        ConfigError is for what no other episode would be spared, and ends the run.
        """

    async def close(self) -> None:
        """Ends what it holds; a second call does nothing."""
