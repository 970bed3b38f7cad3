"""Row weights worked by hand, and that neither the parts nor the rows of a trajectory change them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import InvalidTrajectory, UnknownName
from agentgym.trainers.aggregation import AGGREGATIONS, RowCounts, StepTotals, row_weights

# Trajectory 0 in two rows of 3 and 1 trained tokens, trajectory 1 in one row of 2: 6 tokens, 2 trajectories.
ROWS = RowCounts(trajectory_B=(0, 0, 1), trained_tokens_B=(3, 1, 2))
MODES = ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"]
COUNTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6)


def counts(trajectories: list[list[int]]) -> RowCounts:
    """Trained tokens per row, per trajectory."""
    pairs = [(index, tokens) for index, rows in enumerate(trajectories) for tokens in rows]
    return RowCounts(tuple(index for index, _ in pairs), tuple(tokens for _, tokens in pairs))


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", (1 / 6, 1 / 6, 1 / 6)),
        ("seq-mean-token-mean", (1 / 8, 1 / 8, 1 / 4)),
        ("seq-mean-token-sum", (1 / 2, 1 / 2, 1 / 2)),
    ],
)
def test_weights_worked_by_hand(mode: str, weights: tuple[float, ...]) -> None:
    assert row_weights(mode, ROWS) == pytest.approx(weights)


def test_every_mode_is_tested_here() -> None:
    assert sorted(AGGREGATIONS) == MODES


@pytest.mark.parametrize("mode", MODES)
@given(trajectories=COUNTS)
def test_a_trajectory_weighs_the_same_in_one_row_or_in_many(mode: str, trajectories: list[list[int]]) -> None:
    many, one = counts(trajectories), counts([[sum(rows)] for rows in trajectories])
    whole = dict(zip(one.trajectory_B, row_weights(mode, one), strict=True))
    for trajectory, weight in zip(many.trajectory_B, row_weights(mode, many), strict=True):
        assert weight == pytest.approx(whole[trajectory])


@pytest.mark.parametrize("mode", MODES)
@given(trajectories=COUNTS, cut=st.integers(0, 6))
def test_ranks_that_know_the_totals_weigh_as_one(mode: str, trajectories: list[list[int]], cut: int) -> None:
    whole = counts(trajectories)
    shares = [counts(share) for share in (trajectories[:cut], trajectories[cut:])]
    joined = [weight for share in shares for weight in row_weights(mode, share, whole.totals)]
    assert joined == pytest.approx(list(row_weights(mode, whole)))


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
@given(trajectories=COUNTS)
def test_the_weights_of_the_means_sum_to_one_over_all_tokens(mode: str, trajectories: list[list[int]]) -> None:
    rows = counts(trajectories)
    total = math.fsum(w * n for w, n in zip(row_weights(mode, rows), rows.trained_tokens_B, strict=True))
    assert total == pytest.approx(1.0)


def test_totals_count_trajectories_not_rows() -> None:
    assert ROWS.totals == StepTotals(num_trained_tokens=6, num_trajectories=2)


def test_no_rows_have_no_weights() -> None:
    assert [row_weights(mode, RowCounts((), ())) for mode in MODES] == [(), (), ()]


@pytest.mark.parametrize("totals", [StepTotals(5, 2), StepTotals(6, 1)])
def test_totals_below_the_rows_own_are_refused(totals: StepTotals) -> None:
    with pytest.raises(InvalidTrajectory, match="more than the whole step"):
        row_weights("token-mean", ROWS, totals)


def test_a_row_without_a_trained_token_is_refused() -> None:
    with pytest.raises(InvalidTrajectory, match="at least one sampled token"):
        RowCounts((0,), (0,))


def test_rows_and_counts_must_line_up() -> None:
    with pytest.raises(InvalidTrajectory, match="2 rows need as many token counts, got 1"):
        RowCounts((0, 1), (3,))


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'token-mean'"):
        row_weights("token_mean", ROWS)
