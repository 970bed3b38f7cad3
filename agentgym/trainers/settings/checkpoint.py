"""How often a run writes checkpoints, and which of them stay."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.errors import ConfigError

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and which stay. A resumed run may have other settings here."""

    every: int = 20
    """Steps between checkpoints; the last step always makes one."""
    keep: int = 0
    """The newest checkpoints that stay; 0 keeps all. With 2 or more, there is one to go back to where the newest is
    found torn. The best one, and any that is being read, stay beyond these."""
    keep_best: str | None = "success"
    """The number of metrics.jsonl, such as success or reward_mean, by whose mean over the last 10 steps (or `every`, if
    that is more) the best checkpoint is told: the greatest. It stays whatever `keep` says, and `checkpoints/best` names
    it; null for none."""
    background: bool = True
    """Whether a checkpoint is written while the run goes on, from a copy of its tensors: one more model and optimizer
    of memory for as long as it takes. The files are the same either way."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpoint.every must be at least 1, got {self.every}")
        if self.keep < 0:
            raise ConfigError(f"checkpoint.keep must be at least 1, or 0 to keep all, got {self.keep}")
        if self.keep_best == "":
            raise ConfigError("checkpoint.keep_best is the name of a number in metrics.jsonl, or null for none")
