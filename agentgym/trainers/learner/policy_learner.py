"""What a run asks of its learner, be it in this process or of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["PolicyLearner", "ValueReader"]


class ValueReader(Protocol):
    """A critic, as far as a run asks it."""

    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """See `Critic.read`."""


class PolicyLearner(Protocol):
    """A learner, in this process or of several; see `Learner` for what each method does."""

    config: LearnerConfig
    temperature: float

    @property
    def critic(self) -> ValueReader | None:
        """None where the algorithm has none."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""

    def update(self, batch: TrainingBatch, *, version: int = 0, max_mismatch: float = ...) -> StepStats:
        """Goes over a batch."""

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """Fits the critic to a batch."""

    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """Of the trained targets."""

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """Of the KL term in the reward."""

    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """Squared norms of the gradients of logits."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from it."""

    def close(self) -> None:
        """Ends it."""
