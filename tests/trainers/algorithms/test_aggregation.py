"""Weights by hand and by plain loops, and that neither the parts nor the rows of a trajectory change them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory, UnknownName
from agentgym.trainers.algorithms.aggregation import AGGREGATIONS, RowCounts, StepTotals, turn_weights

# Trajectory 0 in two rows, of turns with 2, 1 and 1 trained tokens, trajectory 1 in one row with one turn of 2:
# 6 tokens, 2 trajectories, 4 turns.
ROWS = RowCounts(trajectory_B=(0, 0, 1), turn_tokens_B=((2, 1), (1,), (2,)))
MODES = [
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "token-sum",
    "turn-mean",
]
TURNS = st.lists(st.integers(1, 9), min_size=1, max_size=3)
COUNTS = st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=6)


def token_weights(
    mode: str, mask_BT: Tensor, *, turns_BT: Tensor | None = None, norm_tokens: int | None = None
) -> Tensor:
    """The weight of every token of a padded step, `[B, T]` float64, 0 outside of the mask: `sum(weight * loss)`.

    A row is a trajectory. `mask_BT` is bool, True where a token is trained. `turns_BT` (int64) is the number of each
    token's turn, and only `turn-mean` needs it. `norm_tokens` is T by default, as in verl. Rows in which nothing is
    trained do not count. Raises as `turn_weights` does.
    """
    if mode == "turn-mean" and turns_BT is None:
        raise ConfigError("turn-mean needs turns_BT, the number of every token's turn")
    turns_BT = torch.zeros_like(mask_BT, dtype=torch.int64) if turns_BT is None else turns_BT
    if mask_BT.ndim != 2 or mask_BT.dtype != torch.bool or turns_BT.shape != mask_BT.shape:
        raise InvalidTrajectory(
            f"the mask is bool [B, T] and the turns have its shape, got {mask_BT.dtype} of {tuple(mask_BT.shape)} and "
            f"{tuple(turns_BT.shape)}"
        )
    weight_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    trained = [row for row in range(len(mask_BT)) if bool(mask_BT[row].any())]
    counted = [torch.unique(turns_BT[row][mask_BT[row]], return_inverse=True, return_counts=True) for row in trained]
    counts = RowCounts(tuple(trained), tuple(tuple(tokens.tolist()) for _, _, tokens in counted))
    norm = max(1, mask_BT.shape[1]) if norm_tokens is None else norm_tokens
    for row, weights, (_, place, _) in zip(trained, turn_weights(mode, counts, norm_tokens=norm), counted, strict=True):
        weight_BT[row, mask_BT[row]] = torch.tensor(weights, dtype=torch.float64, device=mask_BT.device)[place]
    return weight_BT


def counts(trajectories: list[list[list[int]]]) -> RowCounts:
    """Trained tokens per turn, per row, per trajectory."""
    pairs = [(index, tuple(turns)) for index, rows in enumerate(trajectories) for turns in rows]
    return RowCounts(tuple(index for index, _ in pairs), tuple(turns for _, turns in pairs))


def weigh(mode: str, rows: RowCounts, totals: StepTotals | None = None) -> list[float]:
    """The weights of all turns in order; the constant of the mode that has one is 5."""
    return [weight for turns in turn_weights(mode, rows, totals, norm_tokens=5) for weight in turns]


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", (1 / 6, 1 / 6, 1 / 6, 1 / 6)),
        ("token-sum", (1.0, 1.0, 1.0, 1.0)),
        ("seq-mean-token-mean", (1 / 8, 1 / 8, 1 / 8, 1 / 4)),
        ("seq-mean-token-sum", (1 / 2, 1 / 2, 1 / 2, 1 / 2)),
        ("seq-mean-token-sum-norm", (1 / 10, 1 / 10, 1 / 10, 1 / 10)),
        ("turn-mean", (1 / 8, 1 / 4, 1 / 4, 1 / 8)),
    ],
)
def test_weights_worked_by_hand(mode: str, weights: tuple[float, ...]) -> None:
    assert weigh(mode, ROWS) == pytest.approx(weights)
    assert [len(turns) for turns in turn_weights(mode, ROWS, norm_tokens=5)] == [2, 1, 1]


def test_every_mode_is_tested_here() -> None:
    assert sorted(AGGREGATIONS) == MODES


@pytest.mark.parametrize("mode", MODES)
@given(trajectories=COUNTS)
def test_a_trajectory_weighs_the_same_in_one_row_or_in_many(mode: str, trajectories: list[list[list[int]]]) -> None:
    joined = [[[tokens for turns in rows for tokens in turns]] for rows in trajectories]
    assert weigh(mode, counts(trajectories)) == pytest.approx(weigh(mode, counts(joined)))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@given(trajectories=COUNTS, cut=st.integers(0, 6))
def test_ranks_that_know_the_totals_weigh_as_one(mode: str, trajectories: list[list[list[int]]], cut: int) -> None:
    whole = counts(trajectories)
    shares = [counts(share) for share in (trajectories[:cut], trajectories[cut:])]
    joined = [weight for share in shares for weight in weigh(mode, share, whole.totals)]
    assert joined == pytest.approx(weigh(mode, whole))


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "turn-mean"])
@given(trajectories=COUNTS)
def test_the_weights_of_the_means_sum_to_one_over_all_tokens(mode: str, trajectories: list[list[list[int]]]) -> None:
    tokens = [count for rows in trajectories for turns in rows for count in turns]
    total = math.fsum(w * n for w, n in zip(weigh(mode, counts(trajectories)), tokens, strict=True))
    assert total == pytest.approx(1.0)


def test_a_turns_pull_does_not_depend_on_its_length_in_turn_mean_alone() -> None:
    rows = RowCounts((0,), ((1, 9),))
    pulls = {mode: [w * n for w, n in zip(weigh(mode, rows), (1, 9), strict=True)] for mode in MODES}
    assert [mode for mode in MODES if pulls[mode][0] == pytest.approx(pulls[mode][1])] == ["turn-mean"]


def test_totals_count_trajectories_not_rows() -> None:
    assert ROWS.totals == StepTotals(num_trained_tokens=6, num_trajectories=2, num_turns=4)


def test_no_rows_have_no_weights() -> None:
    assert [turn_weights(mode, RowCounts((), ())) for mode in MODES] == [()] * len(MODES)


@pytest.mark.parametrize("totals", [StepTotals(5, 2, 4), StepTotals(6, 1, 4), StepTotals(6, 2, 3)])
def test_totals_below_the_rows_own_are_refused(totals: StepTotals) -> None:
    with pytest.raises(InvalidTrajectory, match="more than the whole step"):
        turn_weights("token-mean", ROWS, totals)


@pytest.mark.parametrize("turns", [(), (2, 0)], ids=str)
def test_a_row_or_turn_without_a_trained_token_is_refused(turns: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTrajectory, match="at least one sampled token"):
        RowCounts((0,), (turns,))


def test_rows_and_counts_must_line_up() -> None:
    with pytest.raises(InvalidTrajectory, match="2 rows need as many token counts, got 1"):
        RowCounts((0, 1), ((3,),))


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'token-mean'"):
        turn_weights("token_mean", ROWS)


def test_the_constant_is_asked_for_and_checked() -> None:
    with pytest.raises(ConfigError, match="divides by norm_tokens"):
        turn_weights("seq-mean-token-sum-norm", ROWS)
    with pytest.raises(ConfigError, match="norm_tokens is 0"):
        turn_weights("seq-mean-token-sum-norm", ROWS, norm_tokens=0)


def aggregated(mode: str, loss: list[list[float]], mask: list[list[bool]], turns: list[list[int]]) -> float:
    """By plain loops over trajectories with anything trained; the constant is the padded length."""
    rows = [
        [(x, turn) for x, own, turn in zip(*row, strict=True) if own] for row in zip(loss, mask, turns, strict=True)
    ]
    rows = [row for row in rows if row]
    every = [x for row in rows for x, _ in row]
    if mode == "token-mean":
        return sum(every) / len(every)
    if mode == "token-sum":
        return sum(every)
    if mode == "turn-mean":
        losses_by_turn: dict[tuple[int, int], list[float]] = {}
        for index, row in enumerate(rows):
            for x, turn in row:
                losses_by_turn.setdefault((index, turn), []).append(x)
        return sum(sum(xs) / len(xs) for xs in losses_by_turn.values()) / len(losses_by_turn)
    sums = [sum(x for x, _ in row) for row in rows]
    if mode == "seq-mean-token-mean":
        return sum(total / len(row) for total, row in zip(sums, rows, strict=True)) / len(rows)
    return sum(sums) / len(rows) / (len(loss[0]) if mode.endswith("norm") else 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_padded_weights_give_the_sums_and_means_of_plain_loops(mode: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss_BT = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    mask_BT = torch.rand(5, 8, generator=generator) < 0.6
    mask_BT[1] = False
    turns_BT = torch.randint(0, 2, (5, 8), generator=generator).cumsum(1)
    weight_BT = token_weights(mode, mask_BT, turns_BT=turns_BT)
    expected = aggregated(mode, loss_BT.tolist(), mask_BT.tolist(), turns_BT.tolist())
    assert float((weight_BT * loss_BT).sum()) == pytest.approx(expected, abs=1e-12)
    assert not weight_BT[~mask_BT].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_in_which_nothing_is_trained_weighs_nothing(mode: str) -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        mask_BT = torch.zeros(shape, dtype=torch.bool)
        weight_BT = token_weights(mode, mask_BT, turns_BT=torch.zeros(shape, dtype=torch.int64))
        assert weight_BT.shape == shape and not weight_BT.any()


def test_turn_mean_needs_the_turns() -> None:
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ConfigError, match="needs turns_BT"):
        token_weights("turn-mean", mask_BT)
    with pytest.raises(InvalidTrajectory, match="turns have its shape"):
        token_weights("turn-mean", mask_BT, turns_BT=torch.zeros(1, 3, dtype=torch.int64))
