"""How token losses become one number: a weight per row, fixed once for a whole optimizer step.

The loss of a step is `sum(weight_N * loss_N)` over all of its trained tokens. Since the weights know the whole step,
the sum may be taken over any split of it (micro-batches, ranks, the rows of a trajectory) and is the same number.

Shapes: `B` row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentgym.errors import InvalidTrajectory
from agentgym.registry import Registry

__all__ = ["AGGREGATIONS", "RowCounts", "StepTotals", "row_weights"]


@dataclass(frozen=True)
class StepTotals:
    """The denominators of a step: what is trained in all of it, on all ranks, rows without gradient included."""

    num_trained_tokens: int
    num_trajectories: int


@dataclass(frozen=True)
class RowCounts:
    """Which trajectory each row belongs to, and how many trained tokens it holds.

    Example: a trajectory in two rows of 3 and 1 sampled tokens, then one in a single row of 2:
    `RowCounts(trajectory_B=(0, 0, 1), trained_tokens_B=(3, 1, 2))`. All rows of a trajectory stand here together.
    """

    trajectory_B: tuple[int, ...]
    trained_tokens_B: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.trajectory_B) != len(self.trained_tokens_B):
            raise InvalidTrajectory(
                f"{len(self.trajectory_B)} rows need as many token counts, got {len(self.trained_tokens_B)}"
            )
        if any(count < 1 for count in self.trained_tokens_B):
            raise InvalidTrajectory("a row that is trained holds at least one sampled token")

    @property
    def totals(self) -> StepTotals:
        """The denominators when these rows are the whole step."""
        return StepTotals(sum(self.trained_tokens_B), len(set(self.trajectory_B)))

    @property
    def trajectory_tokens_B(self) -> tuple[int, ...]:
        """Trained tokens of the row's whole trajectory."""
        tokens: Counter[int] = Counter()
        for trajectory, count in zip(self.trajectory_B, self.trained_tokens_B, strict=True):
            tokens[trajectory] += count
        return tuple(tokens[trajectory] for trajectory in self.trajectory_B)


Aggregation: TypeAlias = Callable[[RowCounts, StepTotals], Sequence[float]]

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation")
"""Every aggregation by name: the weight of each trained token of row b, per row."""


def row_weights(mode: str, rows: RowCounts, totals: StepTotals | None = None) -> tuple[float, ...]:
    """The weight of every trained token of each row, `[B]`; untrained tokens weigh 0.

    `totals` are the denominators of the whole step when `rows` is only a part of it (one rank's share); whole
    trajectories are shared out, never some rows of one. Raises UnknownName for a mode that does not exist and
    InvalidTrajectory when the rows hold more than the totals.
    """
    aggregation = AGGREGATIONS[mode]
    own = rows.totals
    step = own if totals is None else totals
    if own.num_trained_tokens > step.num_trained_tokens or own.num_trajectories > step.num_trajectories:
        raise InvalidTrajectory(f"the rows hold {own}, which is more than the whole step's {step}")
    return tuple(aggregation(rows, step)) if rows.trajectory_B else ()


@AGGREGATIONS.register("token-mean")
def _token_mean(rows: RowCounts, totals: StepTotals) -> Sequence[float]:
    """Every token weighs the same: 1 / all trained tokens of the step. Yu et al. 2025 (DAPO), section 3.3."""
    return [1.0 / totals.num_trained_tokens] * len(rows.trajectory_B)


@AGGREGATIONS.register("seq-mean-token-mean")
def _seq_mean_token_mean(rows: RowCounts, totals: StepTotals) -> Sequence[float]:
    """Every trajectory weighs the same, and its tokens share it. Shao et al. 2024 (GRPO), eq. 3."""
    return [1.0 / (totals.num_trajectories * tokens) for tokens in rows.trajectory_tokens_B]


@AGGREGATIONS.register("seq-mean-token-sum")
def _seq_mean_token_sum(rows: RowCounts, totals: StepTotals) -> Sequence[float]:
    """1 / trajectories for every token, whatever the length. Liu et al. 2025 (Dr. GRPO), section 3.2.

    Difference: the paper's code divides by a constant length as well, which only scales the learning rate.
    """
    return [1.0 / totals.num_trajectories] * len(rows.trajectory_B)
