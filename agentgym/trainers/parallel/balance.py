"""Rows over ranks: what each costs, and consecutive portions whose largest is as small as it can be.

Consecutive, because rows that begin alike are neighbours, and what they share is computed once where they are together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentgym.model.decoder import DecoderConfig
from agentgym.model.packed_layout import MIN_SHARED, shared_length
from agentgym.trainers.batch.batch import TrainingBatch

__all__ = ["RowCost", "balanced", "row_costs"]


@dataclass(frozen=True)
class RowCost:
    """Multiplications of a row in one layer; integers, so that every rank finds the same portions."""

    whole: int
    """Where it is the first of a portion."""
    further: int
    """Behind the row before it, whose beginning it may share; at most `whole`."""


def row_costs(batch: TrainingBatch, config: DecoderConfig) -> list[RowCost]:
    """The cost of each row of the batch: linear in its tokens, and by attention in the square of its length."""
    heads, kv_heads = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    token = config.width * (2 * heads + 2 * kv_heads + 3 * config.ffn_width)
    pair = 2 * heads  # a query with a key, and its weight with the value

    def cost(length: int) -> int:
        return length * token + length * (length + 1) // 2 * pair

    found, before = [], np.zeros(0, np.int64)
    for ids_N in batch.ids_N.cpu().split(batch.seqlens):
        ids = ids_N.numpy()
        shared = shared_length(before, ids)
        whole = cost(len(ids))
        found.append(RowCost(whole, whole - (cost(shared) if shared >= MIN_SHARED else 0)))
        before = ids
    return found


def balanced(costs: Sequence[RowCost], num_portions: int) -> list[range]:
    """The rows of each portion, in order; the last ones are empty where there is nothing left.

    No other cut into consecutive portions has a smaller largest one: the smallest bound that can be kept is found by
    bisection, and each portion is then filled up to it.
    """
    low, high = max((one.whole for one in costs), default=0), sum(one.whole for one in costs)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(costs, middle)) <= num_portions:
            high = middle
        else:
            low = middle + 1
    portions = _filled(costs, high)
    return portions + [range(len(costs), len(costs))] * (num_portions - len(portions))


def _filled(costs: Sequence[RowCost], bound: int) -> list[range]:
    """Portions that cost at most `bound` each, every one as long as that allows."""
    portions: list[range] = []
    start = spent = 0
    for row, cost in enumerate(costs):
        if row > start and spent + cost.further > bound:
            portions.append(range(start, row))
            start, spent = row, 0
        spent += cost.further if row > start else cost.whole
    return [*portions, range(start, len(costs))] if costs else portions
