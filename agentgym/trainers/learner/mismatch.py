"""The difference between the trainer's logprobs and those of the sampling engine, on tokens of the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.errors import TrainingHalted

__all__ = ["Mismatch", "MismatchFound", "MismatchSums"]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The difference over tokens that were sampled with the current weights, in nats."""

    mean: float
    """The mean |logprob of the trainer - logprob of the engine|."""
    max: float
    kl: float
    """An estimate of KL(engine || trainer) from the sampled tokens (k3 of Schulman 2020)."""
    num_tokens: int

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, max {self.max:.2g}, KL {self.kl:.2g} over {self.num_tokens} tokens"


class MismatchFound(TrainingHalted):
    """Trainer and engine differ by more than the allowed bound; the weights are as before the step."""

    def __init__(self, mismatch: Mismatch, bound: float) -> None:
        super().__init__(
            f"trainer and engine differ by {mismatch.max:.3g} nats on a token that was just sampled ({mismatch}), over"
            f" the bound of {bound:.3g}"
        )
        self.mismatch = mismatch
        self.bound = bound

    def __reduce__(self) -> tuple[object, ...]:
        return (MismatchFound, (self.mismatch, self.bound))


@dataclass(frozen=True, eq=False)
class MismatchSums:
    """The sums that a Mismatch is computed from; those of two parts add up. All are scalar tensors."""

    absolute: Tensor
    largest: Tensor
    kl: Tensor
    count: Tensor

    @classmethod
    def of(cls, logp_M: Tensor, old_logp_M: Tensor, fresh_M: Tensor) -> MismatchSums:
        """Sums over tokens: `logp_M` are the trainer's, `old_logp_M` the engine's; `fresh_M` masks those that count."""
        gap_M = torch.where(fresh_M, logp_M - old_logp_M, 0.0)
        largest = gap_M.abs().max() if len(gap_M) else gap_M.sum()
        kl = (gap_M.exp() - 1 - gap_M).sum()
        return cls(gap_M.abs().sum(), largest, kl, fresh_M.sum())

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.absolute + other.absolute,
            torch.maximum(self.largest, other.largest),
            self.kl + other.kl,
            self.count + other.count,
        )

    @property
    def result(self) -> Mismatch:
        """The means; all 0 where no token counts."""
        count = int(self.count)
        tokens = max(1, count)
        return Mismatch(
            mean=float(self.absolute) / tokens, max=float(self.largest), kl=float(self.kl) / tokens, num_tokens=count
        )
