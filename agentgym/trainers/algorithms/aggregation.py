"""The aggregation of token losses to one number: a weight per token, the same within a turn, fixed for a whole step.

The loss of a step is `sum(weight_N * loss_N)` over all of its trained tokens. Since the weights are computed from the
whole optimizer step, the sum over any split of it (micro-batches, ranks, the rows of a trajectory) is the same number.

Shapes: `B` row, `T` token of one row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.registry import Registry
from agentgym.settings.functions import Contract, convert_function_errors

__all__ = ["AGGREGATIONS", "RowCounts", "StepTotals", "check_aggregation", "turn_weights"]


@dataclass(frozen=True)
class StepTotals:
    """The denominators of a step: counts of what is trained on all ranks, rows without gradient included."""

    num_trained_tokens: int
    num_trajectories: int
    num_turns: int
    """Turns with a trained token."""


@dataclass(frozen=True)
class RowCounts:
    """The trajectory that each row belongs to, and the number of trained tokens in each of its turns.

    Example: a trajectory in two rows, of two turns with 2 and 1 sampled tokens and of one turn with 1, then one in a
    single row with one turn of 2: `RowCounts(trajectory_B=(0, 0, 1), turn_tokens_B=((2, 1), (1,), (2,)))`. All rows of
    a trajectory are here together; a turn is in one row.
    """

    trajectory_B: tuple[int, ...]
    turn_tokens_B: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.trajectory_B) != len(self.turn_tokens_B):
            raise InvalidTrajectory(
                f"{len(self.trajectory_B)} rows need as many token counts, got {len(self.turn_tokens_B)}"
            )
        if any(min(turns, default=0) < 1 for turns in self.turn_tokens_B):
            raise InvalidTrajectory("a row that is trained holds at least one sampled token, and so does each turn")

    @property
    def totals(self) -> StepTotals:
        """The denominators when these rows are the whole step."""
        num_turns = sum(len(turns) for turns in self.turn_tokens_B)
        return StepTotals(sum(self.trained_tokens_B), len(set(self.trajectory_B)), num_turns)

    @property
    def trained_tokens_B(self) -> tuple[int, ...]:
        """The number of trained tokens of each row."""
        return tuple(sum(turns) for turns in self.turn_tokens_B)

    @property
    def trajectory_tokens_B(self) -> tuple[int, ...]:
        """The number of trained tokens of each row's whole trajectory."""
        tokens: Counter[int] = Counter()
        for trajectory, count in zip(self.trajectory_B, self.trained_tokens_B, strict=True):
            tokens[trajectory] += count
        return tuple(tokens[trajectory] for trajectory in self.trajectory_B)

    def alike(self, weight_B: Sequence[float]) -> list[list[float]]:
        """One weight for all turns of a row."""
        return [[weight] * len(turns) for weight, turns in zip(weight_B, self.turn_tokens_B, strict=True)]


Weights: TypeAlias = Sequence[Sequence[float]]
Aggregation: TypeAlias = Callable[[RowCounts, StepTotals, int | None], Weights]

AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation",
    "`agentgym algorithms list` shows all.",
    check=Contract("aggregation", ("rows", "totals", "norm_tokens")).check,
)
"""Every aggregation by name: `(rows, totals, norm_tokens)` to the weight of a trained token, per row and turn.

`AGGREGATIONS.register(name)` adds one, and `path/to/file.py:name` is one of a file."""


def turn_weights(
    mode: str, rows: RowCounts, totals: StepTotals | None = None, *, norm_tokens: int | None = None
) -> tuple[tuple[float, ...], ...]:
    """The weight of every trained token of each row's turns, `[B]` tuples; untrained tokens weigh 0.

    `totals` are the denominators of the whole step when `rows` is only a part of it (one rank's share). A rank's share
    consists of whole trajectories. `norm_tokens` is the constant of `seq-mean-token-sum-norm`. Raises UnknownName for a
    mode that does not exist, ConfigError for a constant that is missing or below 1 and for a mode that does not return
    a finite number for each turn, and InvalidTrajectory when the rows hold more than the totals.
    """
    aggregation = AGGREGATIONS[mode]
    if norm_tokens is not None and norm_tokens < 1:
        raise ConfigError(f"norm_tokens is {norm_tokens}; it must be at least 1, such as the longest reply allowed")
    own = rows.totals
    step = own if totals is None else totals
    if (
        own.num_trained_tokens > step.num_trained_tokens
        or own.num_trajectories > step.num_trajectories
        or own.num_turns > step.num_turns
    ):
        raise InvalidTrajectory(f"the rows hold {own}, which is more than the whole step's {step}")
    if not rows.trajectory_B:
        return ()
    with convert_function_errors(f"the aggregation {mode!r}", aggregation):
        weights_B = aggregation(rows, step, norm_tokens)
    return _check_weights(mode, weights_B, [len(turns) for turns in rows.turn_tokens_B])


def _check_weights(mode: str, weights_B: Weights, num_turns_B: list[int]) -> tuple[tuple[float, ...], ...]:
    try:
        weights_by_row = tuple(tuple(float(weight) for weight in weights) for weights in weights_B)
    except TypeError:
        weights_by_row = ()
    if [len(weights) for weights in weights_by_row] != num_turns_B or not all(
        math.isfinite(weight) for weights in weights_by_row for weight in weights
    ):
        raise ConfigError(
            f"aggregation {mode!r} gives {weights_B}, and a finite weight for each turn of each row was wanted, "
            f"{num_turns_B} of them"
        )
    return weights_by_row


def check_aggregation(mode: str, norm_tokens: int | None) -> None:
    """Raises what `turn_weights` raises, on a step of two trajectories."""
    turn_weights(mode, RowCounts((0, 0, 1), ((2, 1), (1,), (2,))), norm_tokens=norm_tokens)


@AGGREGATIONS.register("token-mean")
def _token_mean(rows: RowCounts, totals: StepTotals, norm_tokens: int | None) -> Weights:
    """Every token weighs the same: 1 / all trained tokens of the step. Yu et al. 2025 (DAPO), section 3.3.

    As in verl. A policy that says less per turn makes every other token count more: see `turn-mean`.
    """
    return rows.alike([1.0 / totals.num_trained_tokens] * len(rows.trajectory_B))


@AGGREGATIONS.register("token-sum")
def _token_sum(rows: RowCounts, totals: StepTotals, norm_tokens: int | None) -> Weights:
    """Every token weighs 1: the plain sum, whose size grows with the step and asks for a learning rate to match."""
    return rows.alike([1.0] * len(rows.trajectory_B))


@AGGREGATIONS.register("seq-mean-token-mean")
def _seq_mean_token_mean(rows: RowCounts, totals: StepTotals, norm_tokens: int | None) -> Weights:
    """Every trajectory weighs the same, and its tokens share it. Shao et al. 2024 (GRPO), eq. 3.

    Difference from verl: no 1e-8 added to the tokens; a trajectory of several rows counts as one, not as one per row.
    """
    return rows.alike([1.0 / (totals.num_trajectories * tokens) for tokens in rows.trajectory_tokens_B])


@AGGREGATIONS.register("seq-mean-token-sum")
def _seq_mean_token_sum(rows: RowCounts, totals: StepTotals, norm_tokens: int | None) -> Weights:
    """1 / trajectories for every token, whatever the length. Liu et al. 2025 (Dr. GRPO), section 3.2.

    Difference: the paper's code divides by a constant length as well (`seq-mean-token-sum-norm`), which only scales
    the learning rate. As in verl, except that a trajectory of several rows counts as one, not as one per row.
    """
    return rows.alike([1.0 / totals.num_trajectories] * len(rows.trajectory_B))


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _seq_mean_token_sum_norm(rows: RowCounts, totals: StepTotals, norm_tokens: int | None) -> Weights:
    """1 / (trajectories * norm_tokens) for every token: Dr. GRPO with its constant. Liu et al. 2025, section 3.2.

    The constant is the same in every step. As in verl, whose `loss_scale_factor` it is; verl's default for it, the
    longest reply of the micro-batch, varies from one to the next. A run's default is the paper's generation budget: the
    most tokens that an episode may sample.
    """
    if norm_tokens is None:
        raise ConfigError("seq-mean-token-sum-norm divides by norm_tokens: give it, such as the longest reply allowed")
    return rows.alike([1.0 / (totals.num_trajectories * norm_tokens)] * len(rows.trajectory_B))


@AGGREGATIONS.register("turn-mean")
def _turn_mean(rows: RowCounts, totals: StepTotals, norm_tokens: int | None) -> Weights:
    """Every turn weighs the same, and its tokens share it: 1 / (turns of the step * trained tokens of the turn).

    Ours, for episodes of many turns. Where the denominator counts all sampled tokens (`token-mean`), a turn's pull
    grows with its length, and a policy that says less per turn shrinks the denominator and so is paid for it: each of
    its tokens weighs more. A trajectory's own mean (`seq-mean-token-mean`) only moves that from the step into the
    trajectory. Here a decision has the weight of a decision, however many words it took. verl has no such mode.
    """
    return [[1.0 / (totals.num_turns * tokens) for tokens in turns] for turns in rows.turn_tokens_B]
