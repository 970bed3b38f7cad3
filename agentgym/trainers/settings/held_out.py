"""The settings of evaluations on held-out tasks: before, during and after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least
from agentgym.trainers.tasks.mix import read_mix

__all__ = ["HeldOutConfig"]


@config_class
class HeldOutConfig:
    """Evaluations on held-out tasks, which are never trained on. A resumed run may have other settings here."""

    episodes: int = 200
    """Held-out tasks played before and after training, and every `eval.every` steps in between; 0 plays none."""
    every: int = 0
    """Steps between evaluations during training; 0 plays none. The line of the step that follows one has its numbers
    in metrics.jsonl: `eval_success`, `eval_reward_mean` and, with repeats, `eval_pass_at_4`..."""
    repeats: int = 1
    """Episodes of each held-out task; 2 or more give pass@k."""
    temperature: float | None = None
    """The temperature of these episodes, 0 for greedy ones; None is that of training."""
    mix: Mapping[str, float | Mapping[str, object]] = field(default_factory=dict)
    """The environments whose held-out tasks are played, by weight, written as in practice.mix; left out, those of
    training or the rows of data.eval."""
    patience: int | None = None
    """Ends training once so many evaluations in a row were not better than the best before them, by success, then by
    mean reward; None trains on."""

    def num_played(self, steps: int, num_tasks: int) -> int:
        """Returns the episodes of all evaluations of a run of so many steps with so many held-out tasks."""
        between = (steps - 1) // self.every if self.every else 0
        return (2 + between) * num_tasks * self.repeats

    def __post_init__(self) -> None:
        read_mix(self.mix)
        check_at_least(0, self, "episodes", "every", where="eval.")
        check_at_least(1, self, "repeats", "patience", where="eval.")
        if self.temperature is not None and not self.temperature >= 0:
            raise ConfigError(f"eval.temperature must be at least 0, got {self.temperature}")
        if self.every and not self.episodes:
            raise ConfigError(f"eval.every {self.every} plays held-out tasks, and eval.episodes is 0: leave one out")
        if self.patience is not None and not self.every:
            raise ConfigError("eval.patience counts evaluations during training: add eval.every")
