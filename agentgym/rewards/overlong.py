"""The soft punishment of long episodes."""

from __future__ import annotations

from dataclasses import replace

from agentgym.errors import ConfigError
from agentgym.rewards.reward import InvalidReward, Reward
from agentgym.settings.config_class import config_class
from agentgym.trajectory import Trajectory

__all__ = ["OverlongConfig", "overlong_penalty", "with_overlong"]


@config_class
class OverlongConfig:
    """The token budget of an episode, and the punishment near its end."""

    buffer_tokens: int = 0
    """The number of last tokens of the budget, over which the punishment grows; 0 switches it off."""
    max_tokens: int | None = None
    """The budget: the sampled tokens of a whole episode, beyond which the punishment is full."""
    penalty: float = 1.0
    """The full punishment."""

    def __post_init__(self) -> None:
        if self.buffer_tokens < 0 or not self.penalty >= 0:
            raise ConfigError(f"overlong settings are at least 0, got {self.buffer_tokens} and {self.penalty}")
        if self.buffer_tokens and (self.max_tokens is None or self.max_tokens < self.buffer_tokens):
            raise ConfigError(
                f"overlong.max_tokens is the budget whose last {self.buffer_tokens} tokens are punished, "
                f"got {self.max_tokens}: give the most tokens that an episode may sample"
            )


def overlong_penalty(num_tokens: int, config: OverlongConfig) -> float:
    """`-penalty * min(1, max(0, |y| - (L_max - L_cache)) / L_cache)`: 0 before the buffer, `-penalty` at its end.

    Yu et al. 2025 (DAPO), equation 13, with `L_max = max_tokens` and `L_cache = buffer_tokens`; the paper's penalty
    is 1. `|y|` counts the sampled tokens of all turns. It equals verl's up to the budget, which no reply of verl
    exceeds; here, as in the paper, the punishment stays the same beyond it.

    >>> overlong_penalty(90, OverlongConfig(buffer_tokens=20, max_tokens=100))
    -0.5
    """
    if not config.buffer_tokens or config.max_tokens is None:
        return 0.0
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    return -config.penalty * min(1.0, max(0, over) / config.buffer_tokens) or 0.0


def with_overlong(reward: Reward, trajectory: Trajectory, config: OverlongConfig) -> Reward:
    """Returns the reward with the punishment added on the last turn, as the component `overlong`.

    Success does not change: if neither the reward nor the environment sets it, it is true for a positive unpunished
    reward.
    """
    if not config.buffer_tokens:
        return reward
    penalty = overlong_penalty(_num_sampled(trajectory), config)
    turns = reward.turns
    success = reward.success
    if success is None and "success" not in trajectory.metrics:
        success = reward.value > 0
    return replace(
        reward,
        value=reward.value + penalty,
        components={**reward.components, "overlong": penalty},
        turns=turns and (*turns[:-1], turns[-1] + penalty),
        success=success,
    )


def _num_sampled(trajectory: Trajectory) -> int:
    if trajectory.has_ids:
        return int(sum(row.sampled_mask.sum() for row in trajectory.rows))
    if "completion_tokens" in trajectory.metrics:  # a chat endpoint that returns counts and no ids
        return int(trajectory.metrics["completion_tokens"])
    raise InvalidReward("an episode without token ids has no length to punish: overlong needs an engine that gives ids")
