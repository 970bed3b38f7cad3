"""The tokens that a step of the in-process engine computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentgym.engines.local.kernels.row_products import padded_rows

__all__ = ["Rows", "pad_rows"]

# Shape suffixes: N rows of the step, R rows whose logits are wanted.


@dataclass(frozen=True, eq=False)
class Rows:
    """The tokens due in one step: row `i` is the token at `position_N[i]` of `slot_N[i]`.

    The first `num_decode` rows belong to distinct slots, ascending; the rest are `extends`: (slot, first position,
    number of rows), one after the other. `output_R` are the rows to sample from.

    Example: slots 0 and 2 decode at positions 9 and 4, slot 5 reads a prompt of 3: `Rows(slot_N=[0, 2, 5, 5, 5],
    position_N=[9, 4, 0, 1, 2], num_decode=2, extends=((5, 0, 3),), output_R=[0, 1, 4])`.
    """

    slot_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    num_decode: int
    extends: tuple[tuple[int, int, int], ...]
    output_R: NDArray[np.int64]


def pad_rows(values_N: NDArray[np.int64], value: int = 0) -> NDArray[np.int64]:
    """Pads `values_N` with `value` up to the number of rows that `padded_rows` gives."""
    num_rows = padded_rows(len(values_N))
    if num_rows == len(values_N):
        return values_N
    padded_N = np.full(num_rows, value, np.int64)
    padded_N[: len(values_N)] = values_N
    return padded_N
