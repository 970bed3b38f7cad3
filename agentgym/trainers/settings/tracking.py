"""The settings of what trackers receive."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least

__all__ = ["TrackingConfig"]


@config_class
class TrackingConfig:
    """The data that a run sends to its trackers."""

    project: str = "agentgym"
    """The project (Weights & Biases, trackio) or experiment (MLflow) that the run belongs to."""
    episodes_every: int = 10
    """Steps between samples of episodes; 0 sends none."""
    episodes: int = 8
    """Episodes of a sample, evenly spaced among those of the step."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "episodes", where="tracking.")
        if self.episodes_every < 0:
            raise ConfigError(f"tracking.episodes_every must be at least 0 (none), got {self.episodes_every}")
        if not self.project:
            raise ConfigError("tracking.project is the name of a project, got an empty text")
