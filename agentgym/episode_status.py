"""The status of an episode, and the reasons for which its last turn was the last."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

__all__ = ["Status", "StopReason"]


class Status(StrEnum):
    """The end of an episode, as far as training is concerned."""

    COMPLETED = "completed"  # the environment terminated
    TRUNCATED = "truncated"  # a budget ran out; PPO bootstraps it
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNPLAYED = "unplayed"  # an outside agent ended, and the environment saw no action and gave no verdict

    @property
    def trainable(self) -> bool:
        """True if the episode has a reward and may enter statistics and loss."""
        return self in (Status.COMPLETED, Status.TRUNCATED)

    @property
    def reasons(self) -> frozenset[StopReason]:
        """The reasons for which the last turn of such an episode may be the last."""
        return _REASONS[self]


class StopReason(StrEnum):
    """The reason why the last turn was the last."""

    TERMINATED = "terminated"
    ENV_TRUNCATED = "env_truncated"  # the environment's own limit
    MAX_TURNS = "max_turns"
    TURN_TOKENS = "turn_tokens"
    TRAJECTORY_TOKENS = "trajectory_tokens"
    CONTEXT = "context"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    AGENT = "agent"  # the outside agent ended


_REASONS: Mapping[Status, frozenset[StopReason]] = {
    Status.COMPLETED: frozenset({StopReason.TERMINATED}),
    Status.TRUNCATED: frozenset(
        {
            StopReason.ENV_TRUNCATED,
            StopReason.MAX_TURNS,
            StopReason.TURN_TOKENS,
            StopReason.TRAJECTORY_TOKENS,
            StopReason.CONTEXT,
            StopReason.AGENT,
        }
    ),
    Status.ENV_ERROR: frozenset({StopReason.ENV_ERROR}),
    Status.ENGINE_ERROR: frozenset({StopReason.ENGINE_ERROR}),
    Status.TIMEOUT: frozenset({StopReason.DEADLINE}),
    Status.CANCELLED: frozenset({StopReason.CANCELLED}),
    Status.UNPLAYED: frozenset(
        {StopReason.AGENT, StopReason.CONTEXT, StopReason.MAX_TURNS, StopReason.TRAJECTORY_TOKENS}
    ),
}
