"""The statistics of one update of the policy, and the sums that they are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentgym.trainers.algorithms.losses import LossStats, PairStats, PairSums
from agentgym.trainers.learner.mismatch import MismatchSums
from agentgym.trainers.learner.router_stats import RouterStats, RouterSums

__all__ = ["Report", "StepStats"]


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """The statistics of an update; means are over its `learned_tokens`, in nats, and over its optimizer steps."""

    optimizer_steps: int
    """The optimizer steps that were taken: none where an off-policy correction rejected all tokens."""
    learned_tokens: int
    """The trained tokens of the update: those of rows with an advantage, or all of them if the loss needs them."""
    loss: float
    grad_norm: float
    """The global 2-norm of the gradient before clipping."""
    learning_rate: float
    """The rate of the last optimizer step."""
    entropy: float
    kl: float
    """The divergence from the reference model; 0 without one."""
    kl_coefficient: float
    """The weight of the KL term in this update."""
    clip_fraction: float
    ratio_max: float
    mismatch_mean: float
    """The mean |logprob of the trainer - logprob of the engine| over tokens of the newest weights: rounding alone. It
    is that of the first optimizer step, before which the weights are those that sampled."""
    mismatch_tokens: int
    """The number of these tokens."""
    mismatch_rms: float
    """The root of the mean square of the same, each up to 1 nat."""
    mismatch_p99: float
    """The value that a hundredth of these tokens exceed, up to a factor of the root of 2."""
    mismatch_max: float
    mismatch_kl: float
    """An estimate of KL(engine || trainer) over the same tokens."""
    stale_tokens: int
    """The number of trained tokens of replies that began with older weights."""
    correction_mean: float
    """The mean factor that the losses were multiplied by; 1 without an off-policy correction."""
    corrected_away: float
    """The share of trained tokens whose loss was multiplied by 0."""
    router: RouterStats | None = None
    """Those of the routers in the first optimizer step; None for a model without experts."""
    pairs: PairStats | None = None
    """Those of pairs of replies in the first optimizer step; None for a loss without pairs."""
    merge_lost: float | None = None
    """The share of what the adapters add that rounding took from the merged weights; see `Adapters.merge_lost`."""

    @classmethod
    def mean(cls, steps: Sequence[StepStats], epochs: int = 1) -> StepStats:
        """The statistics of several optimizer steps on one batch, of which each epoch has all tokens."""
        first, last = steps[0], steps[-1]

        def average(name: str) -> float:
            return math.fsum(getattr(step, name) for step in steps) / len(steps)

        if len(steps) == 1:
            return first
        names = ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "correction_mean", "corrected_away")
        return cls(
            **{name: average(name) for name in names},
            optimizer_steps=sum(step.optimizer_steps for step in steps),
            learned_tokens=sum(step.learned_tokens for step in steps) // epochs,
            learning_rate=last.learning_rate,
            kl_coefficient=first.kl_coefficient,
            ratio_max=max(step.ratio_max for step in steps),
            mismatch_mean=first.mismatch_mean,
            mismatch_tokens=first.mismatch_tokens,
            mismatch_rms=first.mismatch_rms,
            mismatch_p99=first.mismatch_p99,
            mismatch_max=first.mismatch_max,
            mismatch_kl=first.mismatch_kl,
            stale_tokens=sum(step.stale_tokens for step in steps) // epochs,
            router=first.router,
            pairs=first.pairs,
        )


@dataclass(frozen=True, eq=False)
class Report:
    """The sums of one micro-batch, as scalars; those of two add up."""

    loss: Tensor
    entropy: Tensor
    kl: Tensor
    mismatch: MismatchSums
    stats: LossStats
    correction: Tensor
    num_rejected: Tensor
    pairs: PairSums
    router: RouterSums

    def __add__(self, other: Report) -> Report:
        return Report(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def scalars_K(self) -> Tensor:
        """All sums in the order of their fields, float64, as processes exchange them."""
        scalars = [*self._plain, *self.mismatch.scalars, *vars(self.stats).values()]
        scalars += [*vars(self.pairs).values(), *self.router.scalars]
        return torch.stack([scalar.detach().double() for scalar in scalars])

    @property
    def _plain(self) -> list[Tensor]:
        return [self.loss, self.entropy, self.kl, self.correction, self.num_rejected]

    @classmethod
    def of_scalars(cls, scalars_K: Tensor) -> Report:
        """The report that `scalars_K` was computed from."""
        loss, entropy, kl, correction, num_rejected, *further = scalars_K.unbind()
        middle = MismatchSums.num_scalars()
        end = middle + len(fields(LossStats))
        last = end + len(fields(PairSums))
        return cls(
            loss=loss,
            entropy=entropy,
            kl=kl,
            mismatch=MismatchSums.of_scalars(further[:middle]),
            stats=LossStats(*further[middle:end]),
            correction=correction,
            num_rejected=num_rejected,
            pairs=PairSums(*further[end:last]),
            router=RouterSums.of_scalars(further[last:]),
        )

    @classmethod
    def nothing(cls, router: RouterSums) -> Report:
        """The sums of no token, with as many experts as these sums have."""
        number = len(fields(cls)) - 4 + MismatchSums.num_scalars() + len(fields(LossStats)) + len(fields(PairSums))
        zeros = [torch.zeros_like(router.loss)] * number
        return cls.of_scalars(torch.stack([scalar.double() for scalar in [*zeros, *router.nothing.scalars]]))

    def result(self, num_trained: int, grad_norm: float, learning_rate: float, kl_coefficient: float) -> StepStats:
        """The statistics of an optimizer step on `num_trained` tokens."""
        mismatch, num_tokens = self.mismatch.result, max(1, num_trained)
        return StepStats(
            optimizer_steps=1,
            learned_tokens=num_trained,
            loss=float(self.loss),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            entropy=float(self.entropy) / num_tokens,
            kl=float(self.kl) / num_tokens,
            kl_coefficient=kl_coefficient,
            clip_fraction=self.stats.clip_fraction,
            ratio_max=float(self.stats.ratio_max),
            mismatch_mean=mismatch.mean,
            mismatch_tokens=mismatch.num_tokens,
            mismatch_rms=mismatch.rms,
            mismatch_p99=mismatch.p99,
            mismatch_max=mismatch.max,
            mismatch_kl=mismatch.kl,
            stale_tokens=num_trained - mismatch.num_tokens,
            correction_mean=float(self.correction) / num_tokens,
            corrected_away=float(self.num_rejected) / num_tokens,
            router=self.router.result,
            pairs=self.pairs.result,
        )
