"""The difference between the trainer's logprobs and those of the sampling engine, on tokens of the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.errors import TrainingHalted

__all__ = ["EDGES", "UNBOUNDED", "Mismatch", "MismatchBound", "MismatchFound", "MismatchSums"]

# Shape suffixes: M tokens, B edges.

EDGES = tuple(2.0 ** (power / 2) for power in range(-60, 7))
"""Nats, from 1e-9 to 8: the numbers of tokens that differ by more are counted, so that parts add up."""
_SIGMAS = 3.0  # by which the squares of some tokens are over a bound that concerns all


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The difference over tokens that were sampled with the current weights, in nats."""

    mean: float
    """The mean |logprob of the trainer - logprob of the engine|."""
    max: float
    kl: float
    """An estimate of KL(engine || trainer) from the sampled tokens (k3 of Schulman 2020)."""
    num_tokens: int
    rms: float
    """The root of the mean square of the differences, of which each counts 1 nat at most."""
    square_deviation: float
    """The standard deviation of the same squares."""
    over: tuple[int, ...] = (0,) * len(EDGES)
    """The numbers of tokens that differ by more than each of `EDGES`."""

    @property
    def p99(self) -> float:
        """The difference that a hundredth of the tokens exceed, up to the next edge."""
        edges = (edge for edge, number in zip(EDGES, self.over, strict=True) if number <= self.num_tokens / 100)
        return min(self.max, next(edges, math.inf))

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2g}, root mean square {self.rms:.2g}, 99th percentile {self.p99:.2g}, max"
            f" {self.max:.2g}, KL {self.kl:.2g} over {self.num_tokens} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class MismatchBound:
    """The most that trainer and engine may differ, in nats."""

    token: float = math.inf
    """The bound of any token, for two sides that compute alike."""
    rms: float = math.inf
    """The bound of the root mean square, for two sides that round differently: single tokens say little of them."""

    def excess(self, mismatch: Mismatch) -> str | None:
        """Returns which bound a mismatch is over, or None.

        The squares of few tokens must be further over theirs than those of many: by three standard errors.
        """
        if mismatch.max > self.token:
            return f"by {mismatch.max:.3g} nats on a token that was just sampled, over the bound of {self.token:.3g}"
        error = mismatch.square_deviation / math.sqrt(max(1, mismatch.num_tokens))
        if mismatch.rms**2 - _SIGMAS * error > self.rms**2:
            return f"by {mismatch.rms:.3g} nats (root mean square), over the bound of {self.rms:.3g}"
        return None


UNBOUNDED = MismatchBound()


class MismatchFound(TrainingHalted):
    """Trainer and engine differ by more than a bound allows; the weights are as before the step."""

    def __init__(self, mismatch: Mismatch, bound: MismatchBound) -> None:
        super().__init__(f"trainer and engine differ {bound.excess(mismatch)} ({mismatch})")
        self.mismatch = mismatch
        self.bound = bound

    def __reduce__(self) -> tuple[object, ...]:
        return (MismatchFound, (self.mismatch, self.bound))


@dataclass(frozen=True, eq=False)
class MismatchSums:
    """The sums that a Mismatch is computed from; those of two parts add up. All are scalar tensors but the last."""

    absolute: Tensor
    squares: Tensor
    fourths: Tensor
    largest: Tensor
    kl: Tensor
    count: Tensor
    over_B: Tensor

    @classmethod
    def of(cls, logp_M: Tensor, old_logp_M: Tensor, fresh_M: Tensor) -> MismatchSums:
        """Sums over tokens: `logp_M` are the trainer's, `old_logp_M` the engine's; `fresh_M` masks those that count."""
        gap_M = torch.where(fresh_M, logp_M - old_logp_M, 0.0)
        off_M, exact_M = gap_M.abs(), gap_M.double()
        square_M = off_M.clamp(max=1.0).square()
        largest = off_M.max() if len(gap_M) else gap_M.sum()
        kl = (exact_M.expm1() - exact_M).sum()  # of small gaps, float32 has nothing left
        edge_B = torch.tensor(EDGES, dtype=off_M.dtype, device=off_M.device)
        over_B = len(off_M) - torch.searchsorted(off_M.sort().values, edge_B, right=True)
        return cls(off_M.sum(), square_M.sum(), square_M.square().sum(), largest, kl, fresh_M.sum(), over_B)

    @classmethod
    def of_scalars(cls, scalars: Sequence[Tensor]) -> MismatchSums:
        """The sums whose `scalars` these are."""
        num_plain = cls.num_scalars() - len(EDGES)
        absolute, squares, fourths, largest, kl, count = scalars[:num_plain]
        return cls(absolute, squares, fourths, largest, kl, count, torch.stack(list(scalars[num_plain:])))

    @classmethod
    def num_scalars(cls) -> int:
        """The number of `scalars`."""
        return 6 + len(EDGES)

    @property
    def scalars(self) -> list[Tensor]:
        """All sums, as processes exchange them."""
        return [self.absolute, self.squares, self.fourths, self.largest, self.kl, self.count, *self.over_B.double()]

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.absolute + other.absolute,
            self.squares + other.squares,
            self.fourths + other.fourths,
            torch.maximum(self.largest, other.largest),
            self.kl + other.kl,
            self.count + other.count,
            self.over_B + other.over_B,
        )

    @property
    def result(self) -> Mismatch:
        """The means; all 0 where no token counts."""
        count = int(self.count)
        tokens = max(1, count)
        square, fourth = float(self.squares) / tokens, float(self.fourths) / tokens
        return Mismatch(
            mean=float(self.absolute) / tokens,
            max=float(self.largest),
            kl=float(self.kl) / tokens,
            num_tokens=count,
            rms=math.sqrt(square),
            square_deviation=math.sqrt(max(0.0, fourth - square**2)),
            over=tuple(int(number) for number in self.over_B),
        )
