"""Rows over ranks: every row once and in order, what a row costs, and no cut that is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.model.decoder import Decoder
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.parallel.balance import RowCost, balance_rows, row_costs

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def costs_of(lengths: Sequence[int], shares: Sequence[int] | None = None) -> list[RowCost]:
    """Of rows that begin with `shares` in common with the one before them, as far as both are that long."""
    costs, before = [], 0
    for length, share in zip(lengths, shares or [0] * len(lengths), strict=True):
        shared = min(length, share, before)
        costs.append(RowCost(3 * length + length**2, 3 * (length - shared) + length**2 - shared**2))
        before = length
    return costs


def spent(costs: Sequence[RowCost], rows: range) -> int:
    return sum(costs[row].whole if row == rows.start else costs[row].further for row in rows)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=40), st.integers(1, 9))
def test_every_row_is_in_one_portion_and_in_order(rows: list[tuple[int, int]], num_portions: int) -> None:
    portions = balance_rows(costs_of(*zip(*rows, strict=True)) if rows else [], num_portions)
    assert len(portions) == num_portions
    assert [row for portion in portions for row in portion] == list(range(len(rows)))


@given(LENGTHS.filter(bool), st.integers(1, 9))
def test_no_portion_costs_more_than_the_mean_and_one_row(lengths: list[int], num_portions: int) -> None:
    costs = costs_of(lengths)
    total, longest = sum(row_cost.whole for row_cost in costs), max(row_cost.whole for row_cost in costs)
    assert all(spent(costs, rows) <= total / num_portions + longest for rows in balance_rows(costs, num_portions))


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_no_cut_into_consecutive_portions_is_better(rows: list[tuple[int, int]], num_portions: int) -> None:
    costs = costs_of(*zip(*rows, strict=True))
    cuts = combinations_with_replacement(range(len(costs) + 1), num_portions - 1)
    every = (pairwise([0, *cut, len(costs)]) for cut in cuts)
    best = min(max(spent(costs, range(a, b)) for a, b in portions) for portions in every)
    assert max(spent(costs, portion) for portion in balance_rows(costs, num_portions)) == best


@pytest.mark.parametrize(("shared", "counts"), [(40, True), (10, False)])
def test_a_row_costs_the_products_of_its_tokens_and_of_what_they_attend_to(
    shared: int, counts: bool, tiny: Callable[..., Decoder], fresh_batch: Callable[..., TrainingBatch]
) -> None:
    model = tiny()
    layer = model.layers[0]
    numbers = sum(matrix.numel() for matrix in layer.parameters() if matrix.ndim == 2)
    heads = model.config.num_heads * model.config.head_width

    def cost(num_tokens: int) -> int:
        return sum(numbers + 2 * heads * (place + 1) for place in range(num_tokens))

    batch = fresh_batch(model, num_groups=1, shared=shared)
    costs = row_costs(batch, model)
    assert [row_cost.whole for row_cost in costs] == [cost(length) for length in batch.seqlens]
    assert costs[0].further == costs[0].whole
    ids = [one_T.tolist() for one_T in batch.ids_N.split(batch.seqlens)]
    for row_cost, row, (before, own) in zip(costs[1:], batch.seqlens[1:], pairwise(ids), strict=True):
        alike = next(place for place, (a, b) in enumerate(zip(before, own, strict=False)) if a != b)
        assert alike >= shared
        assert row_cost.further == cost(row) - (cost(alike) if counts else 0)
