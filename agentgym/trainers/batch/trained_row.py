"""A row that is trained, as tensors; the only place in the project with a shift by one.

Every tensor is aligned to its TARGET token: entry n holds the token before the target (the model's input), the target,
and the numbers that belong to the target. A row of T tokens has T - 1 entries.

Shapes: `N` entries, `T` token of the row before the shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.trajectory import Row

__all__ = ["DTYPES", "TrainedRow"]

DTYPES = {
    "ids_N": torch.int64,
    "target_N": torch.int64,
    "position_N": torch.int64,
    "mask_N": torch.bool,
    "sampled_logp_N": torch.float32,
    "old_logp_N": torch.float32,
    "correction_N": torch.float32,
    "advantage_N": torch.float32,
    "return_N": torch.float32,
    "old_value_N": torch.float32,
    "weight_N": torch.float32,
    "policy_version_N": torch.int64,
    "reply_version_N": torch.int64,
    "row_N": torch.int64,
    "trajectory_N": torch.int64,
}


@dataclass(frozen=True)
class TrainedRow:
    """A row that enters the loss, with the credit of its trajectory."""

    row: Row
    row_index: int
    trajectory_index: int
    advantages: NDArray[np.float32]
    """The advantage of each sampled id; the two fields below have one number for each of them too."""
    returns: NDArray[np.float32]
    values: NDArray[np.float32]

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """The number of tokens of each trained turn; a turn is one span."""
        return tuple(len(span.ids) for span in self.row.spans if span.is_trained and span.ids)

    def columns(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """The entries of one row; here, and only here, inputs and targets are shifted against each other."""
        row = self.row
        ids_T, mask_T = torch.tensor(row.ids), torch.tensor(row.mask)
        mask_N = mask_T[1:]
        sampled_T = torch.tensor(row.sampled_mask)

        def scatter_to_targets(numbers: NDArray[np.float32]) -> Tensor:
            """Puts the numbers of the sampled ids at their targets."""
            number_T = torch.zeros(len(row))
            number_T[sampled_T] = torch.tensor(numbers)
            return torch.where(mask_N, number_T[1:], 0.0)

        weight_T = torch.zeros(len(row))
        weight_T[mask_T] = torch.from_numpy(np.repeat(np.asarray(weights, np.float32), self.turn_tokens))
        length = len(mask_N)
        logp_N = torch.where(mask_N, torch.tensor(row.logprobs)[1:], 0.0)
        return {
            "ids_N": ids_T[:-1],
            "target_N": ids_T[1:],
            "position_N": torch.arange(length),
            "mask_N": mask_N,
            "sampled_logp_N": logp_N,
            "old_logp_N": logp_N,
            "correction_N": mask_N.float(),
            "advantage_N": scatter_to_targets(self.advantages),
            "return_N": scatter_to_targets(self.returns),
            "old_value_N": scatter_to_targets(self.values),
            "weight_N": weight_T[1:],
            "policy_version_N": torch.where(mask_N, torch.tensor(row.policy_versions)[1:], -1),
            "reply_version_N": torch.where(mask_N, torch.tensor(row.reply_versions)[1:], -1),
            "row_N": torch.full((length,), self.row_index),
            "trajectory_N": torch.full((length,), self.trajectory_index),
        }
