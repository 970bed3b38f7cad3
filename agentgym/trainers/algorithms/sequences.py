"""Sums and other statistics over trajectories of tokens, or over groups of episodes.

Shapes: `N` tokens, flattened; `S` sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory

__all__ = ["Sequences"]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Tokens of any shape, assigned to `S` sequences; sums are float64, so that their order hardly matters.

    Example: sequences [[4, 4], [9, 4]] become `number_N` (0, 0, 1, 0) and `num_sequences` 2.
    """

    number_N: Tensor
    """int64, 0 to S - 1."""
    num_sequences: int
    shape: torch.Size
    """The tokens' own shape, to which `spread` returns."""

    @classmethod
    def of(cls, sequences: Tensor | None, tokens: Tensor, asked_by: str) -> Sequences:
        """Assigns tokens by `sequences` (int64, the shape of `tokens`), their trajectories; None takes `[B, T]` rows.

        Raises ConfigError for None where tokens are packed `[N]`, and InvalidTrajectory for another shape or type.
        """
        if sequences is None:
            if tokens.ndim != 2:
                raise ConfigError(
                    f"{asked_by} sums over each trajectory: tokens of shape {tuple(tokens.shape)} need `sequences`, the"
                    " number of every token's trajectory (only [B, T] has its rows as a default)"
                )
            rows = torch.arange(tokens.shape[0], device=tokens.device)
            sequences = rows[:, None].expand(tokens.shape)
        if sequences.shape != tokens.shape or sequences.dtype != torch.int64:
            raise InvalidTrajectory(
                f"sequences are one int64 per token of {tuple(tokens.shape)}, got {sequences.dtype} of shape "
                f"{tuple(sequences.shape)}"
            )
        return cls.by_ids(sequences)

    @classmethod
    def by_ids(cls, *ids: Tensor) -> Sequences:
        """Groups members with equal ids (int64, of one shape); with several ids, those for which all are equal."""
        names, number_N = torch.unique(ids[0].reshape(-1), return_inverse=True)
        for ids_N in ids[1:]:  # `torch.unique` of columns, with `dim`, takes several times as long
            further, own_N = torch.unique(ids_N.reshape(-1), return_inverse=True)
            names, number_N = torch.unique(number_N * len(further) + own_N, return_inverse=True)
        return cls(number_N, len(names), ids[0].shape)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each sequence, `[S]` float64, with gradient."""
        flat_N = values.reshape(-1).to(torch.float64)
        return torch.zeros(self.num_sequences, dtype=torch.float64, device=values.device).index_add(
            0, self.number_N, flat_N
        )

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """The mean over each sequence's tokens in `mask`, `[S]` float64; 0 where there is none.

        `values` are 0 outside of `mask`.
        """
        return self.sum(values) / self.sum(mask).clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """The largest value of each sequence, at least 0, `[S]` float64."""
        flat_N = values.reshape(-1).to(torch.float64)
        largest_S = torch.zeros(self.num_sequences, dtype=torch.float64, device=values.device)
        return largest_S.scatter_reduce(0, self.number_N, flat_N, "amax")

    def min(self, values: Tensor) -> Tensor:
        """The smallest value of each sequence, `[S]` float64."""
        flat_N = values.reshape(-1).to(torch.float64)
        smallest_S = torch.full((self.num_sequences,), torch.inf, dtype=torch.float64, device=values.device)
        return smallest_S.scatter_reduce(0, self.number_N, flat_N, "amin")

    def spread(self, values_S: Tensor) -> Tensor:
        """Each sequence's value at all of its tokens, in the tokens' own shape."""
        return values_S[self.number_N].reshape(self.shape)
