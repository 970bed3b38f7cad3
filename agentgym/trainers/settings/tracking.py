"""The settings of what trackers receive, and how long a run waits for them."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.errors import ConfigError

__all__ = ["TrackingConfig"]


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The data that a run sends to its trackers."""

    project: str = "agentgym"
    """The project (Weights & Biases, trackio) or experiment (MLflow) that the run belongs to."""
    episodes_every: int = 10
    """Steps between samples of episodes; 0 sends none."""
    episodes: int = 8
    """Episodes of a sample, evenly spaced among those of the step."""
    room: int = 256
    """The number of items that may wait for a slow tracker; beyond it, new ones are dropped and counted."""
    finish_s: float = 60.0
    """Seconds that the end of a run waits for its trackers to finish writing."""

    def __post_init__(self) -> None:
        for name in ("episodes", "room"):
            if getattr(self, name) < 1:
                raise ConfigError(f"tracking.{name} must be at least 1, got {getattr(self, name)}")
        if self.episodes_every < 0:
            raise ConfigError(f"tracking.episodes_every must be at least 0 (none), got {self.episodes_every}")
        if not self.finish_s > 0:
            raise ConfigError(f"tracking.finish_s must be above 0, got {self.finish_s}")
        if not self.project:
            raise ConfigError("tracking.project is the name of a project, got an empty text")
