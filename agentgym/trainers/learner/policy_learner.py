"""The interface of a run's learner, in this process or in several."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.mismatch import MismatchBound
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["PolicyLearner", "ValueEstimator"]


class ValueEstimator(Protocol):
    """The part of a critic that a run uses."""

    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The values of the trained targets, `[M]`, and those after the last id of each row, `[R]`."""


class PolicyLearner(Protocol):
    """A learner, in this process or in several; see `Learner` for each method."""

    config: LearnerConfig
    temperature: float

    @property
    def critic(self) -> ValueEstimator | None:
        """The critic; None if the algorithm has none."""

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps so far."""

    def update(self, batch: TrainingBatch, *, version: int = 0, bound: MismatchBound = ...) -> StepStats:
        """Updates the policy on a batch."""

    def measure(self, batch: TrainingBatch) -> StepStats:
        """The statistics of a batch, without an update."""

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """Fits the critic to a batch."""

    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """The logprobs of the trained targets."""

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """The penalties of the KL term in the reward."""

    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """The squared norms of the gradients by the logits."""

    def close(self) -> None:
        """Closes the learner."""
