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
    """Tokens of any shape, assigned to `S` sequences.

    Statistics are float64: a GPU adds in no fixed order, and the rounding of float32 would depend on it.
    Example: sequences [[4, 4], [9, 4]] become `index_N` (0, 0, 1, 0) and `num_sequences` 2.
    """

    index_N: Tensor
    """int64; the index of each token's sequence, 0 to S - 1."""
    num_sequences: int
    shape: torch.Size
    """The shape of the tokens before they were flattened, which `spread` returns."""

    @classmethod
    def of(cls, sequences: Tensor | None, tokens: Tensor, algorithm: str) -> Sequences:
        """Assigns each token to its trajectory, whose id is in `sequences` (int64, the shape of `tokens`).

        None makes each row of `[B, T]` tokens a sequence. Raises ConfigError for None with packed tokens `[N]`, with
        the name of the `algorithm` that needs them, and InvalidTrajectory for another shape or type.
        """
        if sequences is None:
            if tokens.ndim != 2:
                raise ConfigError(
                    f"{algorithm} sums over each trajectory: tokens of shape {tuple(tokens.shape)} need `sequences`,"
                    " the number of every token's trajectory (only [B, T] has its rows as a default)"
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
        """Makes a sequence of the tokens with equal ids (int64, of one shape); several ids must all be equal."""
        unique_ids, index_N = torch.unique(ids[0].reshape(-1), return_inverse=True)
        for ids_N in ids[1:]:  # one `torch.unique` of all columns, with `dim`, takes several times as long
            more_ids, more_N = torch.unique(ids_N.reshape(-1), return_inverse=True)
            unique_ids, index_N = torch.unique(index_N * len(more_ids) + more_N, return_inverse=True)
        return cls(index_N, len(unique_ids), ids[0].shape)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each sequence, `[S]` float64, with gradient."""
        flat_N = values.reshape(-1).to(torch.float64)
        return torch.zeros(self.num_sequences, dtype=torch.float64, device=values.device).index_add(
            0, self.index_N, flat_N
        )

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """The mean over each sequence's tokens in `mask`, `[S]` float64; 0 for a sequence without such a token.

        `values` must be 0 outside of `mask`.
        """
        return self.sum(values) / self.sum(mask).clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """The largest value of each sequence, or 0 if all are negative, `[S]` float64."""
        flat_N = values.reshape(-1).to(torch.float64)
        largest_S = torch.zeros(self.num_sequences, dtype=torch.float64, device=values.device)
        return largest_S.scatter_reduce(0, self.index_N, flat_N, "amax")

    def min(self, values: Tensor) -> Tensor:
        """The smallest value of each sequence, `[S]` float64."""
        flat_N = values.reshape(-1).to(torch.float64)
        smallest_S = torch.full((self.num_sequences,), torch.inf, dtype=torch.float64, device=values.device)
        return smallest_S.scatter_reduce(0, self.index_N, flat_N, "amin")

    def spread(self, values_S: Tensor) -> Tensor:
        """Each sequence's value at all of its tokens, in the tokens' own shape."""
        return values_S[self.index_N].reshape(self.shape)
