"""The statistics of pairs of a better and a worse reply, and the sums that they are computed from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PairStats", "PairSums"]

# Shape suffix: S pairs.


@dataclass(frozen=True, kw_only=True)
class PairStats:
    """Means over the pairs of a step, before its update."""

    accuracy: float
    """The share of pairs whose better reply has gained more than the worse one since the first weights."""
    margin: float
    """The mean difference of what they gained, in nats times beta."""
    chosen_reward: float
    """The gain of the better replies, in nats times beta."""
    rejected_reward: float
    preference_loss: float
    """The loss of the order of the replies alone."""
    sft_loss: float
    """The negative log likelihood of the better replies, in nats per token."""


@dataclass(frozen=True, eq=False)
class PairSums:
    """Sums over pairs without gradient, scalars of float64; those of two micro-batches add up."""

    num_pairs: Tensor
    won: Tensor
    chosen: Tensor
    rejected: Tensor
    preference: Tensor
    imitation: Tensor

    @classmethod
    def nothing(cls, like: Tensor) -> PairSums:
        """Returns the sums of no pair, on the device of a tensor."""
        return cls(*[torch.zeros((), dtype=torch.float64, device=like.device)] * 6)

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def result(self) -> PairStats | None:
        """The means; None without pairs."""
        if not (number := float(self.num_pairs)):
            return None
        won, chosen, rejected, preference, imitation = (float(value) / number for value in [*vars(self).values()][1:])
        return PairStats(
            accuracy=won,
            margin=chosen - rejected,
            chosen_reward=chosen,
            rejected_reward=rejected,
            preference_loss=preference,
            sft_loss=imitation,
        )
