"""Batches against the worked example, and the gradient of a small model that no way of cutting a step may change.

The model is a softmax over a table of logits, one line per input token, so a target's gradient depends on its
(input, target) pair alone and every split of a step has the same exact gradient.

Shapes: `N` packed tokens, `V` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory, UnknownName
from agentgym.rollout.limits import Limits
from agentgym.trainers.algorithms.aggregation import AGGREGATIONS, StepTotals
from agentgym.trainers.algorithms.losses import ppo_clip
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import credit_groups, flat_credit
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.token_budget import with_token_budget
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("TextGame-v0", seed=7)
VOCABULARY = 12
STOP = 11
MODES = sorted(AGGREGATIONS)
WIDE = {"clip_low": 0.999, "clip_high": 1e4, "dual_clip": None}  # so that hardly a gradient is clipped away

few = settings(max_examples=60)  # a step is costly to compute


def policy(*ids: int, logprob: float = -2.0, version: int = 0) -> TokenSpan:
    return TokenSpan(ids, Source.POLICY, (logprob,) * len(ids), (version,) * len(ids))


def env(*ids: int) -> TokenSpan:
    return TokenSpan(ids, Source.ENV)


def prompt(*ids: int) -> TokenSpan:
    return TokenSpan(ids, Source.PROMPT)


def trajectory(member: int, reward: float | None, *rows: tuple[TokenSpan, ...], group: str = "g") -> Trajectory:
    failed = reward is None
    num_turns = sum(span.source is Source.POLICY for row in rows for span in row)
    rewards = [None if failed else 0.0] * (num_turns - 1) + [reward]
    return Trajectory(
        task=TASK,
        group=group,
        member=member,
        rows=tuple(Row(row) for row in rows),
        turns=tuple(Turn(Message("assistant", "x"), reward) for reward in rewards),
        status=Status.ENV_ERROR if failed else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
        error="sandbox died" if failed else None,
    )


def group_of(*trajectories: Trajectory) -> Group:
    return Group(trajectories[0].group, TASK, trajectories)


def batch_of(*groups: Group, aggregation: str = "token-mean", drop_zero: bool = False) -> TrainingBatch:
    credits = credit_groups(groups, "grpo")
    return build_batch(groups, credits, aggregation=aggregation, norm_tokens=5, drop_zero=drop_zero)


def logits_gradient(batch: TrainingBatch, table: Tensor) -> Tensor:
    """The gradient of the step's loss by the logits of every entry, `[N, V]`."""
    logits = table[batch.ids_N].requires_grad_()
    logp_N = logits.log_softmax(-1).gather(1, batch.target_N[:, None])[:, 0]
    loss_N = ppo_clip(logp_N, batch.old_logp_N, batch.advantage_N, batch.mask_N, **WIDE).loss
    (gradient,) = torch.autograd.grad((batch.weight_N * loss_N).sum(), logits)
    return gradient


def table_gradient(batch: TrainingBatch) -> Tensor:
    """The gradient of the step's loss by the whole table, in float64."""
    table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return torch.zeros_like(table).index_add(0, batch.ids_N, logits_gradient(batch, table))


# The example of the class's docstring, twice: a good member and a bad one.
SPANS = (prompt(1, 2), policy(3, 4), env(5), policy(6))
PAIR = group_of(trajectory(0, 1.0, SPANS), trajectory(1, 0.0, SPANS))
HALVES = flat_credit(PAIR, [0.5, -0.5])


def test_the_worked_example_is_what_a_batch_holds() -> None:
    batch = build_batch([PAIR], [HALVES], aggregation="token-mean").select([0])
    assert batch.ids_N.tolist() == [1, 2, 3, 4, 5]
    assert batch.target_N.tolist() == [2, 3, 4, 5, 6]
    assert batch.position_N.tolist() == [0, 1, 2, 3, 4]
    assert batch.mask_N.tolist() == [False, True, True, False, True]
    assert batch.old_logp_N.tolist() == [0.0, -2.0, -2.0, 0.0, -2.0]
    assert batch.advantage_N.tolist() == [0.0, 0.5, 0.5, 0.0, 0.5]
    assert batch.weight_N.tolist() == pytest.approx([0, 1 / 6, 1 / 6, 0, 1 / 6])
    assert batch.policy_version_N.tolist() == [-1, 0, 0, -1, 0]
    assert batch.seqlens == (5,)
    assert batch.totals == StepTotals(num_trained_tokens=6, num_trajectories=2, num_turns=4)


def test_turns_of_unequal_length_weigh_the_same_where_that_is_asked_for() -> None:
    batch = build_batch([PAIR], [HALVES], aggregation="turn-mean").select([1])
    assert batch.weight_N.tolist() == pytest.approx([0, 1 / 8, 1 / 8, 0, 1 / 4])


def test_turns_kept_out_of_the_loss_do_not_count_as_turns() -> None:
    summary = replace(policy(7, 8), excluded="summary")
    spans = (prompt(1, 2), policy(3, 4), env(5), summary, env(9), policy(6))
    batch = batch_of(group_of(trajectory(0, 1.0, spans), trajectory(1, 0.0, SPANS)), aggregation="turn-mean")
    assert batch.select([0]).weight_N.tolist() == pytest.approx([0, 1 / 8, 1 / 8, 0, 0, 0, 0, 1 / 4])


def test_rows_are_laid_end_to_end_and_counted_over_everything() -> None:
    first = group_of(
        trajectory(0, None, SPANS),
        trajectory(1, 1.0, (prompt(1), policy(2)), (prompt(1, 3), policy(4))),
        trajectory(2, 0.0, (prompt(1), policy(5))),
    )
    second = group_of(trajectory(0, 1.0, SPANS, group="h"), trajectory(1, 0.0, SPANS, group="h"))
    batch = batch_of(first, second)
    assert batch.seqlens == (1, 2, 1, 5, 5)
    assert batch.cu_seqlens.tolist() == [0, 1, 3, 4, 9, 14]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.row_N.tolist() == [1, 2, 2, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5]
    assert batch.trajectory_N.tolist() == [1, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4]
    assert (batch.num_rows, batch.num_tokens, batch.num_trained_tokens) == (5, 14, 9)
    assert batch.totals == StepTotals(num_trained_tokens=9, num_trajectories=4, num_turns=7)


def test_versions_and_logprobs_stay_with_the_token_they_were_sampled_with() -> None:
    spans = (
        prompt(1),
        TokenSpan((2, 3), Source.POLICY, (-0.25, -0.5), (4, 5)),
        env(6),
        TokenSpan((7,), Source.POLICY, (-0.75,), (5,)),
    )
    batch = batch_of(group_of(trajectory(0, 1.0, spans), trajectory(1, 0.0, SPANS))).select([0])
    assert dict(zip(batch.target_N.tolist(), batch.old_logp_N.tolist(), strict=True)) == {
        2: -0.25, 3: -0.5, 6: 0.0, 7: -0.75,
    }  # fmt: skip
    assert dict(zip(batch.target_N.tolist(), batch.policy_version_N.tolist(), strict=True)) == {2: 4, 3: 5, 6: -1, 7: 5}
    assert dict(zip(batch.target_N.tolist(), batch.reply_version_N.tolist(), strict=True)) == {2: 4, 3: 4, 6: -1, 7: 5}


def test_the_sampled_stop_token_is_trained_and_the_templates_newline_is_not() -> None:
    newline, uniform = 10, -math.log(VOCABULARY)
    spans = (prompt(1, 2), policy(3, STOP, logprob=uniform), env(newline, 4), policy(5, STOP, logprob=uniform))
    batch = batch_of(group_of(trajectory(0, 1.0, spans), trajectory(1, 0.0, spans)))
    assert batch.mask_N[batch.target_N == STOP].tolist() == [True] * 4
    assert batch.mask_N[batch.target_N == newline].tolist() == [False] * 2
    gradient = logits_gradient(batch, torch.zeros(VOCABULARY, VOCABULARY))
    assert gradient[batch.target_N == STOP].abs().sum(1).min() > 0
    assert not gradient[batch.target_N == newline].any()


@st.composite
def spans_of_a_row(draw: st.DrawFn) -> tuple[TokenSpan, ...]:
    token = st.integers(0, VOCABULARY - 1)
    ids = st.lists(token, min_size=1, max_size=4)
    spans = [prompt(*draw(ids))]
    for number in range(draw(st.integers(1, 3))):
        if number:
            spans.append(env(*draw(ids)))
        spans.append(policy(*draw(ids), logprob=draw(st.floats(-6, -1, width=32))))
    return tuple(spans)


@st.composite
def groups(draw: st.DrawFn, *, name: str = "g", failures: bool = True) -> Group:
    reward = st.sampled_from([0.0, 0.5, 1.0])
    rewards = draw(st.lists(st.one_of(st.none(), reward) if failures else reward, min_size=2, max_size=4))
    rows = st.lists(spans_of_a_row(), min_size=1, max_size=3)
    return group_of(*(trajectory(number, value, *draw(rows), group=name) for number, value in enumerate(rewards)))


STEPS = st.tuples(groups(name="g"), groups(name="h"))


@pytest.mark.long
@few
@given(mode=st.sampled_from(MODES), step=STEPS, max_tokens=st.integers(1, 40))
def test_splitting_into_micro_batches_leaves_the_gradient_unchanged(
    mode: str, step: tuple[Group, Group], max_tokens: int
) -> None:
    batch = batch_of(*step, aggregation=mode)
    parts = batch.split(max_tokens)
    summed = sum((table_gradient(part) for part in parts), torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64))
    torch.testing.assert_close(summed, table_gradient(batch), rtol=0, atol=1e-6)


@pytest.mark.long
@few
@given(mode=st.sampled_from(MODES), group=groups())
def test_splitting_an_episode_into_rows_leaves_the_gradient_unchanged(mode: str, group: Group) -> None:
    # Row k holds everything before reply k as its prompt, so each reply is trained once, under its own prefix.
    def one_reply_a_row(row: Row) -> list[tuple[TokenSpan, ...]]:
        before = [sum((span.ids for span in row.spans[:end]), ()) for end in range(len(row.spans))]
        return [(prompt(*before[end]), span) for end, span in enumerate(row.spans) if span.source is Source.POLICY]

    pieces = group_of(
        *(
            replace(member, rows=tuple(Row(piece) for row in member.rows for piece in one_reply_a_row(row)))
            for member in group.trajectories
        )
    )
    whole, cut = batch_of(group, aggregation=mode), batch_of(pieces, aggregation=mode)
    assert cut.totals == whole.totals
    torch.testing.assert_close(table_gradient(cut), table_gradient(whole), rtol=0, atol=1e-6)


@pytest.mark.long
@few
@given(step=STEPS)
def test_only_sampled_targets_have_a_gradient(step: tuple[Group, Group]) -> None:
    batch = batch_of(*step)
    gradient = logits_gradient(batch, torch.randn(VOCABULARY, VOCABULARY))
    assert not gradient[~batch.mask_N].any()
    assert gradient.isfinite().all()


@pytest.mark.long
@few
@given(step=STEPS)
def test_every_sampled_token_of_a_trained_member_is_a_target_once(step: tuple[Group, Group]) -> None:
    batch = batch_of(*step)
    trained = [member for group in step for member in group.trajectories if member.status.trainable]
    sampled = [
        token
        for member in trained
        for row in member.rows
        for span in row.spans
        for token in span.ids
        if span.source is Source.POLICY
    ]
    assert batch.target_N[batch.mask_N].tolist() == sampled
    turns = [turn for member in trained for turn in member.turns]
    assert batch.totals == StepTotals(len(sampled), len(trained), len(turns))


@pytest.mark.long
@few
@given(mode=st.sampled_from(MODES), group=groups(failures=False), data=st.data())
def test_failed_members_change_nothing_for_the_others(mode: str, group: Group, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(group.trajectories)))
    broken = trajectory(99, None, *data.draw(st.lists(spans_of_a_row(), min_size=1, max_size=2)))
    with_failure = group_of(*group.trajectories[:place], broken, *group.trajectories[place:])
    batch, clean = batch_of(with_failure, aggregation=mode), batch_of(group, aggregation=mode)
    for name in ("ids_N", "target_N", "position_N", "mask_N", "old_logp_N", "advantage_N", "weight_N"):
        assert torch.equal(getattr(batch, name), getattr(clean, name)), name
    assert batch.seqlens == clean.seqlens
    assert batch.totals == clean.totals
    assert torch.equal(table_gradient(batch), table_gradient(clean))


@few
@given(mode=st.sampled_from(MODES), group=groups(), data=st.data())
def test_the_order_of_the_members_does_not_change_the_gradient(mode: str, group: Group, data: st.DataObject) -> None:
    shuffled = group_of(*data.draw(st.permutations(group.trajectories)))
    torch.testing.assert_close(
        table_gradient(batch_of(shuffled, aggregation=mode)),
        table_gradient(batch_of(group, aggregation=mode)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.long
@few
@given(mode=st.sampled_from(MODES), step=STEPS)
def test_dropping_rows_without_advantage_changes_neither_gradient_nor_denominators(
    mode: str, step: tuple[Group, Group]
) -> None:
    whole, smaller = batch_of(*step, aggregation=mode), batch_of(*step, aggregation=mode, drop_zero=True)
    assert smaller.totals == whole.totals
    assert smaller.seqlens == tuple(
        length
        for length, part in zip(whole.seqlens, (whole.select([row]) for row in range(whole.num_rows)), strict=True)
        if part.advantage_N.any()
    )
    torch.testing.assert_close(table_gradient(smaller), table_gradient(whole), rtol=0, atol=1e-6)


@pytest.mark.long
@few
@given(step=STEPS, max_tokens=st.integers(1, 40))
def test_micro_batches_hold_every_row_once_and_no_more_than_allowed(step: tuple[Group, Group], max_tokens: int) -> None:
    batch = batch_of(*step)
    parts = batch.split(max_tokens)
    assert sorted(row for part in parts for row in set(part.row_N.tolist())) == sorted(set(batch.row_N.tolist()))
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    for part in parts:
        assert part.num_tokens <= max_tokens or part.num_rows == 1
        assert part.row_N.tolist() == sorted(part.row_N.tolist())
        assert part.totals == batch.totals
    again = [part.row_N.tolist() for part in batch.split(max_tokens)]
    assert again == [part.row_N.tolist() for part in parts]


def rows_of_lengths(*lengths: int) -> TrainingBatch:
    """A batch whose rows have the given number of entries."""
    members = [
        trajectory(number, float(number), (prompt(1), policy(*[2] * length))) for number, length in enumerate(lengths)
    ]
    return batch_of(group_of(*members))


def test_micro_batches_keep_the_order_of_rows() -> None:
    parts = rows_of_lengths(2, 5, 3, 9, 1).split(8)
    assert [part.seqlens for part in parts] == [(2, 5), (3,), (9,), (1,)]
    assert [sorted(set(part.row_N.tolist())) for part in parts] == [[0, 1], [2], [3], [4]]


def test_a_prompt_that_a_group_shares_counts_once_in_a_micro_batch() -> None:
    task = tuple(range(60))
    members = [
        trajectory(number, float(number), (prompt(*task), policy(*[number] * 11))) for number in range(6)
    ]  # 70 entries each, 60 of them alike
    batch = batch_of(group_of(*members))
    assert [part.num_rows for part in batch.split(100)] == [4, 2]
    assert [part.num_rows for part in batch.split(120)] == [6]
    assert [part.num_rows for part in batch.split(70)] == [1] * 6


def test_a_step_in_which_nothing_is_left_is_an_empty_batch() -> None:
    equal = group_of(trajectory(0, 0.7, SPANS), trajectory(1, 0.7, SPANS))
    batch = batch_of(equal, drop_zero=True)
    assert (batch.num_rows, batch.num_tokens, batch.num_trained_tokens) == (0, 0, 0)
    assert batch.totals == StepTotals(num_trained_tokens=6, num_trajectories=2, num_turns=4)
    assert batch.split(8) == []
    assert batch.cu_seqlens.tolist() == [0]

    failed = group_of(trajectory(0, None, SPANS), trajectory(1, None, SPANS))
    assert batch_of(failed).totals == StepTotals(num_trained_tokens=0, num_trajectories=0, num_turns=0)
    assert build_batch([], [], aggregation="token-mean").num_rows == 0


def test_a_row_in_which_nothing_was_sampled_is_left_out() -> None:
    member = trajectory(0, 1.0, (prompt(1, 2),), (prompt(1), policy(2)))
    batch = batch_of(group_of(member, trajectory(1, 0.0, SPANS)))
    assert batch.row_N.tolist() == [1, 2, 2, 2, 2, 2]


def test_ranks_given_the_totals_of_the_step_sum_to_its_gradient() -> None:
    second_group = group_of(trajectory(0, 1.0, SPANS, group="h"), trajectory(1, 0.0, (prompt(3), policy(1)), group="h"))
    whole = batch_of(PAIR, second_group, aggregation="seq-mean-token-mean")
    ranks = [
        build_batch([group], credit_groups([group], "grpo"), aggregation="seq-mean-token-mean", totals=whole.totals)
        for group in (PAIR, second_group)
    ]
    assert [rank.totals for rank in ranks] == [whole.totals] * 2
    summed = table_gradient(ranks[0]) + table_gradient(ranks[1])
    torch.testing.assert_close(summed, table_gradient(whole), rtol=0, atol=1e-6)


def test_a_batch_moves_whole_to_another_device() -> None:
    batch = batch_of(PAIR)
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.target_N, batch.target_N)
    assert (moved.seqlens, moved.totals) == (batch.seqlens, batch.totals)


def test_a_failed_member_marked_as_trained_is_refused() -> None:
    group = group_of(trajectory(0, 1.0, SPANS), trajectory(1, None, SPANS))
    with pytest.raises(InvalidTrajectory, match="ended as env_error and has no reward"):
        build_batch([group], [HALVES], aggregation="token-mean")


def test_groups_and_advantages_must_line_up() -> None:
    with pytest.raises(InvalidTrajectory, match="1 groups need as many advantages, got 0"):
        build_batch([PAIR], [], aggregation="token-mean")
    three = group_of(*(trajectory(number, 1.0, SPANS) for number in range(3)))
    with pytest.raises(InvalidTrajectory, match="has 3 members but 2 advantages"):
        build_batch([three], [HALVES], aggregation="token-mean")


def test_an_unknown_aggregation_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'token-mean'"):
        build_batch([PAIR], [HALVES], aggregation="token_mean")


def test_micro_batches_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        batch_of(PAIR).split(0)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("position_N", 5, 5, "positions count from 0"),
        ("row_N", 1, 9, "row_N is the same number"),
        ("trajectory_N", 1, 9, "trajectory_N is the same number"),
        ("advantage_N", 0, 1.0, "advantage_N is 0 wherever"),
        ("advantage_N", 1, math.nan, "advantage_N holds a number that is not finite"),
        ("weight_N", 0, 0.5, "weight_N is 0 wherever"),
        ("weight_N", 1, 0.0, "weights are above 0"),
        ("old_logp_N", 0, -1.0, "old_logp_N is 0 wherever"),
        ("old_logp_N", 1, 0.5, "logprobs are at most 0"),
        ("policy_version_N", 0, 0, "policy versions are given for exactly"),
        ("policy_version_N", 1, -1, "policy versions are given for exactly"),
        ("reply_version_N", 0, 0, "reply versions are given for exactly"),
        ("reply_version_N", 1, 9, "no token is older than its reply"),
        ("ids_N", 1, 7, "each input is the target before it"),
    ],
)
def test_a_batch_that_does_not_hold_together_is_refused(name: str, place: int, value: float, message: str) -> None:
    batch = batch_of(PAIR)
    tensor = getattr(batch, name).clone()
    tensor[place] = value
    with pytest.raises(InvalidTrajectory, match=message):
        replace(batch, **{name: tensor})


def test_tensors_of_the_wrong_shape_or_type_are_refused() -> None:
    batch = batch_of(PAIR)
    with pytest.raises(InvalidTrajectory, match=r"target_N has shape \(9,\)"):
        replace(batch, target_N=batch.target_N[1:])
    with pytest.raises(InvalidTrajectory, match=r"weight_N is torch\.float64"):
        replace(batch, weight_N=batch.weight_N.double())
    with pytest.raises(InvalidTrajectory, match="at least one target"):
        replace(batch, seqlens=(10, 0))


def test_the_algo_dr_grpo_sums_an_episode_and_divides_by_a_constant_alone() -> None:
    """By hand, after Liu et al. 2025, listing 1: `sum(mask * loss) / MAX_TOKENS`, then the mean over episodes."""
    config = with_token_budget(TrainConfig(env="GuessNumber-v0", algo="dr_grpo"))
    assert (config.estimator, config.aggregation) == ("dr_grpo", "seq-mean-token-sum-norm")
    norm = config.norm_tokens
    assert norm == 2048  # 4 turns of a quarter of the window each
    long = trajectory(0, 1.0, (prompt(1), policy(2, 3, 4), env(5), policy(6, 7, 8, STOP)))
    short, failed = trajectory(1, 0.0, (prompt(1), policy(2, STOP))), trajectory(2, None, (prompt(1), policy(2)))
    groups = [group_of(long, short, failed)]
    credits = credit_groups(groups, config.estimator)
    batch = build_batch(groups, credits, aggregation=config.aggregation or "", norm_tokens=norm)
    assert batch.advantage_N[batch.mask_N].tolist() == [0.5] * 7 + [-0.5] * 2
    assert batch.weight_N[batch.mask_N].tolist() == pytest.approx([1 / (2 * 2048)] * 9)
    assert float((batch.weight_N * batch.advantage_N).sum()) == pytest.approx((7 * 0.5 - 2 * 0.5) / 2048 / 2)


@pytest.mark.parametrize(
    ("settings_of_run", "norm"),
    [
        ({"env": "Math-v0"}, 2048),
        ({"env": "GuessNumber-v0", "limits": Limits(turn_tokens=10)}, 40),
        ({"env": "GuessNumber-v0", "limits": Limits(turn_tokens=10, max_turns=3)}, 30),
        ({"env": "GuessNumber-v0", "limits": Limits(trajectory_tokens=500)}, 500),
        ({"env": "GuessNumber-v0", "norm_tokens": 64}, 64),
    ],
)
def test_the_constant_of_dr_grpo_is_the_most_that_an_episode_may_sample(
    settings_of_run: dict[str, Any], norm: int
) -> None:
    assert with_token_budget(TrainConfig(algo="dr_grpo", **settings_of_run)).norm_tokens == norm
