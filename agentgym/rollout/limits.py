"""What an episode may use, and how its replies are sampled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from agentgym.errors import ConfigError

__all__ = ["Limits", "SamplingConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """The distribution that replies are drawn from."""

    temperature: float = 1.0
    """0 is greedy; logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature:
            raise ConfigError(f"temperature must be at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}; 1 switches it off")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be at least 0, got {self.top_k}; 0 switches it off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The budgets of one episode; whichever runs out first truncates it and gives its name to the stop reason.

    A row is never shortened to fit: what does not fit is not sampled, or not appended.
    """

    max_turns: int = 16
    """Replies."""
    turn_tokens: int = 512
    """The most ids of one reply."""
    trajectory_tokens: int | None = None
    """The most ids of all rows together, prompts and answers included; None leaves it to the context window."""
    context_window: int | None = None
    """The most ids that a prompt and its reply have together; None takes the engine's, and the smaller one holds."""
    deadline_s: float = 600.0
    """Wall-clock seconds of a whole episode, from its reset; past it the episode has the status `timeout`."""
    env_step_s: float = 60.0
    """Wall-clock seconds of one environment call (make, reset or step), counted from when it begins to run."""
    close_s: float = 3.0
    """Wall-clock seconds that closing an environment may delay the rollout; then it closes by itself or never."""
    cut_reply: Literal["truncate", "answer"] = "truncate"
    """What a reply that meets `turn_tokens` does: end the episode, or go to the environment as it is."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and value is not None and not value > 0:
                raise ConfigError(f"{field.name} must be greater than 0, got {value}")
        if self.cut_reply not in ("truncate", "answer"):
            raise ConfigError(f'cut_reply is "truncate" or "answer", got {self.cut_reply!r}')
