"""A micro-batch of an update, with its losses where those are computed over the whole step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agentgym.trainers.algorithms.losses import LossStats, PolicyLoss
from agentgym.trainers.batch.batch import TrainingBatch

__all__ = ["FoundLoss", "MicroBatch"]


@dataclass(frozen=True, eq=False)
class FoundLoss:
    """The losses of some tokens of a step and their slopes, a linear approximation near their logprobs."""

    loss_M: Tensor
    slope_M: Tensor
    """The derivative of the step's loss by the token's logprob, per unit of the token's weight."""
    stats: LossStats

    def at(self, logp_M: Tensor) -> PolicyLoss:
        """The losses once more, with the gradient that they have in the step."""
        return PolicyLoss(self.loss_M + self.slope_M * (logp_M - logp_M.detach()), self.stats)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch, and its losses where they were computed over the whole step."""

    batch: TrainingBatch
    found: FoundLoss | None = None
    is_idle: bool = False
    """True if it only keeps this rank in step with the others."""
