"""The settings of checkpoints: how often a run writes them, and which it keeps."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class

__all__ = ["CheckpointConfig"]


@config_class
class CheckpointConfig:
    """The interval of checkpoints, and which are kept. A resumed run may have other settings here."""

    every: int = 20
    """Steps between checkpoints; the last step always writes one."""
    keep: int = 0
    """The number of newest checkpoints that are kept; 0 keeps all. With 2 or more, there is one to fall back to if the
    newest is corrupt. The best one, and any that is being read, are kept beyond these."""
    keep_best: str | None = "success"
    """The metric of metrics.jsonl, such as success or reward_mean, that the best checkpoint is chosen by: the one with
    the greatest mean over the last 10 steps (or `every`, if that is more). By a number of the held-out tasks, such as
    eval_success, it is the one that did best in an evaluation during training (eval.every) or after it; each of these
    evaluations has a checkpoint then. It is kept whatever `keep` is, and `checkpoints/best` names it; null for none."""
    background: bool = True
    """Writes checkpoints while the run goes on, from a copy of its tensors, which takes the memory of one more model
    and optimizer meanwhile. The files are the same either way."""

    copy_to: str | None = None
    """The address of a folder, such as s3://bucket/run (fsspec and its library for s3), to which the run is copied
    after each checkpoint. `--resume` fetches it into an --output that holds no run. The next checkpoint waits for the
    copy of the one before."""

    @property
    def best_is_held_out(self) -> bool:
        """True if the best checkpoint is chosen by evaluations."""
        return bool(self.keep_best and self.keep_best.startswith("eval_"))

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpoint.every must be at least 1, got {self.every}")
        if self.keep < 0:
            raise ConfigError(f"checkpoint.keep must be at least 1, or 0 to keep all, got {self.keep}")
        if self.keep_best == "":
            raise ConfigError("checkpoint.keep_best is the name of a number in metrics.jsonl, or null for none")
