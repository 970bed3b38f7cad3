"""A micro-batch of an update, with its losses where those are computed over the whole step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.trainers.algorithms.losses import LossStats, PolicyLoss, PolicyLossFn
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.parallel.learner_ranks import LearnerRanks, Share

__all__ = ["FoundLoss", "MicroBatch", "parts_of_step"]


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


def parts_of_step(
    batch: TrainingBatch, share: Share, logp_M: Tensor, loss: PolicyLossFn, ranks: LearnerRanks
) -> list[MicroBatch]:
    """Returns the micro-batches of a share, with the losses of a whole step whose trained targets have these logprobs.

    The derivative by each logprob is exact, so that a micro-batch that propagates these back has its share of the
    step's gradient, however the step is split.
    """
    logp_M = logp_M.requires_grad_()
    names = ("old_logp_N", "advantage_N", "trajectory_N", "weight_N", "correction_N")
    old_M, advantage_M, trajectory_M, weight_M, correction_M = (
        getattr(batch, name)[batch.mask_N].to(ranks.device) for name in names
    )
    all_M = torch.ones_like(logp_M, dtype=torch.bool)
    policy = loss(logp_M, old_M, advantage_M, all_M, sequences=trajectory_M)
    corrected_M = correction_M * policy.loss
    (slope_M,) = torch.autograd.grad((weight_M * corrected_M).sum(), logp_M)
    own, idle = share.parts[: share.num_own], share.parts[share.num_own :]
    here, sizes = share.targets.here, [part.num_trained_tokens for part in own]
    losses, slopes = corrected_M.detach()[here].split(sizes), (slope_M / weight_M)[here].split(sizes)
    stats = [policy.stats if ranks.portion == 0 else policy.stats.nothing, *[policy.stats.nothing] * len(own)]
    loss_parts = (FoundLoss(*numbers) for numbers in zip(losses, slopes, stats, strict=False))
    return [
        *(MicroBatch(part, loss_part) for part, loss_part in zip(own, loss_parts, strict=True)),
        *(MicroBatch(part, is_idle=True) for part in idle),
    ]
