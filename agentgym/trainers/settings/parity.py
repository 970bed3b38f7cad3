"""The settings of the comparison between the engine's and the trainer's logprobs."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.errors import ConfigError
from agentgym.settings import check_at_least

__all__ = ["ParityConfig"]


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """The check that ends training if the engine samples from another distribution than the one that is trained."""

    max_mismatch: float | None = None
    """The most nats between the trainer's and the engine's logprob of a token that was just sampled. None takes ten
    times the difference at the start, at least 0.001 in float32 and 0.125 in other types, so that each is held to its
    own rounding."""
    every: int = 10
    """Steps between probes: fresh replies whose logprobs are recomputed. Every step's own tokens are compared anyway,
    before they are trained on."""
    episodes: int = 4
    """Episodes of a probe."""
    turns: int = 3
    """The most replies of each episode; several, so that the prefix cache is probed too."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "every", "episodes", "turns", where="parity.")
        if self.max_mismatch is not None and not self.max_mismatch > 0:
            raise ConfigError(f"parity.max_mismatch must be greater than 0, got {self.max_mismatch}")
