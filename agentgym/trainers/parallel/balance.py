"""Distributes rows over ranks: the cost of each row, and consecutive portions whose largest cost is minimal.

Portions are consecutive because rows with a common prefix are neighbours, and within a portion it is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.model.language_model import LanguageModel
from agentgym.trainers.batch.batch import TrainingBatch

__all__ = ["RowCost", "balance_rows", "divide_batch", "row_costs"]


@dataclass(frozen=True)
class RowCost:
    """The multiplications of a row in one layer; integers, so that every rank computes the same portions."""

    whole: int
    """The cost as the first row of a portion."""
    further: int
    """The cost after the row before it, whose prefix it may share; at most `whole`."""


def row_costs(batch: TrainingBatch, model: LanguageModel) -> list[RowCost]:
    """The cost of each row of the batch, or of the rows that stay together (`TrainingBatch.units`).

    It is linear in the tokens of a row, and by attention in the square of its length. A model that does not pack rows
    computes each of them whole.
    """
    token, pair = model.layer_cost

    def cost(length: int) -> int:
        return length * token + length * (length + 1) // 2 * pair

    shared_B = batch.shared_B if model.packs else [0] * batch.num_rows
    costs = []
    for rows in batch.units:
        whole = sum(cost(batch.seqlens[row]) for row in rows) - sum(cost(shared_B[row]) for row in rows[1:])
        costs.append(RowCost(whole, whole - cost(shared_B[rows[0]])))
    return costs


def divide_batch(batch: TrainingBatch, model: LanguageModel, num_portions: int) -> list[range]:
    """Returns the consecutive rows of each portion, whose costs are balanced."""
    starts = [*(rows[0] for rows in batch.units), batch.num_rows]
    portions = balance_rows(row_costs(batch, model), num_portions)
    return [range(starts[units.start], starts[units.stop]) for units in portions]


def balance_rows(costs: Sequence[RowCost], num_portions: int) -> list[range]:
    """Returns the rows of each portion, in order; the last portions are empty if no rows are left.

    No other split into consecutive portions has a smaller largest cost: bisection finds the smallest feasible bound,
    and each portion is then filled up to it.
    """
    low, high = max((cost.whole for cost in costs), default=0), sum(cost.whole for cost in costs)
    while low < high:
        middle = (low + high) // 2
        if len(_fill_portions(costs, middle)) <= num_portions:
            high = middle
        else:
            low = middle + 1
    portions = _fill_portions(costs, high)
    return portions + [range(len(costs), len(costs))] * (num_portions - len(portions))


def _fill_portions(costs: Sequence[RowCost], bound: int) -> list[range]:
    """Portions that cost at most `bound` each, every one as long as the bound allows."""
    portions: list[range] = []
    start = spent = 0
    for row, cost in enumerate(costs):
        if row > start and spent + cost.further > bound:
            portions.append(range(start, row))
            start, spent = row, 0
        spent += cost.further if row > start else cost.whole
    return [*portions, range(start, len(costs))] if costs else portions
