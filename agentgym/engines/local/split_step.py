"""A step of a small model on several threads, each of which computes some of the rows through all layers.

Threads inside one operator wait for each other at every operator, which takes longer than a small model's products. A
row's bits do not depend on the other rows of its step, so splitting a step changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.cores import num_cores
from agentgym.engines.local.compiled_step import Runner
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.transformers_step import TransformersStep

__all__ = ["SplitStep", "split_rows", "usual_parts"]

# Shape suffixes: N rows of the step, R rows whose logits are wanted, V vocabulary.

MIN_PART_ROWS = 24
"""The fewest rows for which another thread pays."""


def usual_parts() -> int:
    """Returns the number of parts that pays on this machine, by default."""
    return min(2, num_cores())


class SplitStep:
    """Runs steps of `runner` in up to `num_parts` parts at once, one of them on the thread that calls `forward`.

    The step of a model that transformers computes is never split: its attention holds one step.
    """

    def __init__(self, runner: Runner, num_parts: int) -> None:
        self._runner = runner
        self._num_parts = 1 if isinstance(runner, TransformersStep) else num_parts
        self._pool = ThreadPoolExecutor(
            num_parts, thread_name_prefix="agentgym-split-step", initializer=torch.set_num_threads, initargs=(1,)
        )

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        num_parts = min(self._num_parts, len(rows.slot_N) // MIN_PART_ROWS)
        if num_parts < 2:
            return self._runner.forward(rows)
        (own_R, own), *others = split_rows(rows, num_parts)
        started = [(part_R, self._pool.submit(self._compute, part)) for part_R, part in others]
        try:
            own_logits = self._runner.forward(own)
        finally:
            wait([computing for _, computing in started])
        logits_RV = own_logits.new_empty(len(rows.wanted_R), own_logits.shape[1])
        logits_RV[torch.from_numpy(own_R)] = own_logits
        for part_R, computed in started:
            logits_RV[torch.from_numpy(part_R)] = computed.result()
        return logits_RV

    @torch.inference_mode()
    def _compute(self, rows: Rows) -> Tensor:
        return self._runner.forward(rows)

    def forget(self) -> None:
        """Forgets the addresses of weights and cache, which will have others."""
        forget = getattr(self._runner, "forget", None)
        if forget is not None:
            forget()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def split_rows(rows: Rows, num_parts: int) -> Sequence[tuple[NDArray[np.int64], Rows]]:
    """Splits a step into parts of about as many rows, by slots; at most `num_parts`, and none without rows.

    Each part is given with the places of its wanted rows among those of the step.
    """
    starts = np.cumsum([rows.num_decode, *(size for _, _, size in rows.extends)])
    extends: list[list[int]] = [[] for _ in range(num_parts)]
    num_rows = [0] * num_parts
    for index in sorted(range(len(rows.extends)), key=lambda index: -rows.extends[index][2]):
        emptiest = min(range(num_parts), key=num_rows.__getitem__)
        extends[emptiest].append(index)
        num_rows[emptiest] += rows.extends[index][2]
    parts, first = [], 0
    for part in range(num_parts):
        num_left = rows.num_decode - first
        fair = (sum(num_rows[part:]) + num_left) // (num_parts - part)
        end = first + (num_left if part == num_parts - 1 else min(num_left, max(0, fair - num_rows[part])))
        own = sorted(extends[part])
        index_N = np.concatenate([np.arange(first, end), *(np.arange(*starts[i : i + 2]) for i in own)])
        if len(index_N):
            wanted = np.isin(rows.wanted_R, index_N)
            parts.append((np.flatnonzero(wanted), _part(rows, index_N, end - first, own, rows.wanted_R[wanted])))
        first = end
    return parts


def _part(
    rows: Rows, index_N: NDArray[np.int64], num_decode: int, extends: Sequence[int], wanted_R: NDArray[np.int64]
) -> Rows:
    return Rows(
        rows.slot_N[index_N],
        rows.position_N[index_N],
        num_decode,
        tuple(rows.extends[index] for index in extends),
        np.searchsorted(index_N, wanted_R),
    )
