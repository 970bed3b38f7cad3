"""A trajectory in several rows has the gradient of its tokens, each under its own prefix, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from agentgym.model.decoder import Decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import GroupCredit, credit_groups
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

Tiny = Callable[..., Decoder]
Logprobs = Callable[..., list[float]]
Ids = list[int]
TASK = Task("TextGame-v0", seed=7)
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
NUM_TURNS = 4


def ids_of(count: int, generator: torch.Generator) -> Ids:
    ids: Ids = torch.randint(0, 40, (count,), generator=generator).tolist()
    return ids


def reply_span(model: Decoder, prefix: Ids, reply: Ids, logprobs_of: Logprobs) -> TokenSpan:
    """The reply as the model samples it behind `prefix`."""
    logprobs = tuple(logprobs_of(model, [*prefix, *reply])[len(prefix) - 1 :])
    return TokenSpan(tuple(reply), Source.POLICY, logprobs, (0,) * len(reply))


def trajectory(rows: Sequence[Row], member: int) -> Trajectory:
    turns = [Turn(Message("assistant", "x"), 0.0) for row in rows for span in row.spans if span.source is Source.POLICY]
    turns[-1] = Turn(Message("assistant", "x"), float(member))
    return Trajectory(TASK, "g", member, tuple(rows), tuple(turns), Status.COMPLETED, StopReason.TERMINATED)


def whole_row(pieces: Sequence[Ids], model: Decoder, logprobs_of: Logprobs) -> Row:
    """Prompt, reply, answer, reply, ... in one row."""
    spans = [TokenSpan(tuple(pieces[0]), Source.PROMPT)]
    for index, piece in enumerate(pieces[1:], 1):
        before = [i for earlier in pieces[:index] for i in earlier]
        is_reply = index % 2 == 1
        spans.append(reply_span(model, before, piece, logprobs_of) if is_reply else TokenSpan(tuple(piece), Source.ENV))
    return Row(tuple(spans))


def split_rows(row: Row) -> list[Row]:
    """The same replies, each in a row of its own behind the same prefix."""
    starts = [0, *accumulate(len(span.ids) for span in row.spans)]
    ids = row.ids.tolist()
    return [
        Row((TokenSpan(tuple(ids[:start]), Source.PROMPT), span))
        for start, span in zip(starts, row.spans, strict=False)
        if span.source is Source.POLICY
    ]


def members(seed: int, model: Decoder, logprobs_of: Logprobs) -> list[Row]:
    """One row for each of four members, of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [[5, *(3 + (member + turn) % 4 for turn in range(2 * NUM_TURNS - 1))] for member in range(4)]
    return [whole_row([ids_of(length, generator) for length in sizes], model, logprobs_of) for sizes in lengths]


def credited(rows: Sequence[Sequence[Row]]) -> tuple[Group, GroupCredit]:
    group = Group("g", TASK, tuple(trajectory(member_rows, member) for member, member_rows in enumerate(rows)))
    return group, credit_groups([group], "grpo")[0]


def first_of(credit: GroupCredit) -> list[float]:
    """The advantage of each member, which all of its counted tokens share."""
    return [float(rows[0][0]) for rows in credit.members if rows is not None]


def gradient(model: Decoder, batch: TrainingBatch, micro_batch_tokens: int = 2048) -> list[Tensor]:
    """What the learner hands to its optimizer for a step on the batch."""
    config = LearnerConfig(threads=1, micro_batch_tokens=micro_batch_tokens)
    learner = Learner(model, config, OptimizerConfig(max_grad_norm=1e9), total_steps=1)
    seen: list[Tensor] = []

    def keep() -> float:
        seen.extend(
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for parameter in model.parameters()
        )
        return 0.0

    learner.optimizer.step = keep  # type: ignore[method-assign]  # the weights stay, so that steps can be compared
    try:
        learner.update(batch)
    finally:
        learner.close()
        model.zero_grad(set_to_none=True)
    return seen


def by_hand(
    model: Decoder, rows: Sequence[Sequence[Row]], advantages: Sequence[float], weights: Sequence[float]
) -> list[Tensor]:
    """`-sum(weight * advantage * gradient of log p(id | prefix))`, reply by reply, with plain autograd."""
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for own, advantage, weight in zip(rows, advantages, weights, strict=True):
        for row in own:
            ids_T = torch.tensor(row.ids)
            logits_TV = model.logits(model.hidden_states(ids_T[:-1], PackedLayout([len(ids_T) - 1])))
            logp_T = logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
            loss = -(weight * advantage * logp_T[torch.tensor(row.mask)[1:]]).sum()
            for gradient_sum, part in zip(total, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                gradient_sum += part
    return total


def weights_by_hand(aggregation: str, rows: Sequence[Sequence[Row]]) -> list[float]:
    counts = [sum(int(row.mask.sum()) for row in own) for own in rows]
    if aggregation == "token-mean":
        return [1 / sum(counts)] * len(rows)
    return [1 / (len(rows) * (count if aggregation == "seq-mean-token-mean" else 1)) for count in counts]


def assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """The weights are float64, so that only float32 logits are rounded."""
    scale = max(float(part.abs().max()) for part in right)
    assert scale > 1e-3, "a gradient of nothing shows nothing"
    for mine, theirs in zip(left, right, strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-6 * max(1.0, scale)


@pytest.mark.long
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("micro_batch_tokens", [2048, 40])
def test_splitting_trajectories_into_rows_leaves_the_gradient(
    aggregation: str, micro_batch_tokens: int, tiny: Tiny, plain_logprobs: Logprobs
) -> None:
    model = tiny().double()
    whole = [[row] for row in members(0, model, plain_logprobs)]
    split = [split_rows(row) for (row,) in whole]
    assert [len(rows) for rows in split] == [NUM_TURNS] * 4
    gradients = []
    for rows in (whole, split, [split[0], whole[1], split[2], whole[3]]):
        group, credit = credited(rows)
        batch = build_batch([group], [credit], aggregation=aggregation)
        assert batch.num_trained_tokens == sum(row.num_trained_tokens for (row,) in whole)
        gradients.append(gradient(model, batch, micro_batch_tokens))
    assert_equal(gradients[1], gradients[0])
    assert_equal(gradients[2], gradients[0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rewritten_histories_have_the_gradient_of_each_reply_under_its_own_prefix(
    aggregation: str, tiny: Tiny, plain_logprobs: Logprobs
) -> None:
    """Each member tells its history in other words twice; the sum is worked out reply by reply."""
    model = tiny().double()
    generator = torch.Generator().manual_seed(1)
    rows: list[list[Row]] = []
    for member in range(4):
        num_rows = 1 + member % 3
        lengths = [[4 + number, 3 + member, 2, 4] for number in range(num_rows)]
        rows.append([whole_row([ids_of(n, generator) for n in sizes], model, plain_logprobs) for sizes in lengths])
    group, credit = credited(rows)
    batch = build_batch([group], [credit], aggregation=aggregation)
    expected = by_hand(model, rows, first_of(credit), weights_by_hand(aggregation, rows))
    assert_equal(gradient(model, batch), expected)


def test_an_excluded_reply_is_read_by_the_others_and_has_no_gradient(tiny: Tiny, plain_logprobs: Logprobs) -> None:
    model = tiny().double()
    whole = [[row] for row in members(2, model, plain_logprobs)]
    (row,) = whole[3]
    last = row.spans[-1]
    quiet = TokenSpan(last.ids, last.source, last.logprobs, last.policy_versions, excluded="summary")
    rows = [*whole[:3], [Row((*row.spans[:-1], quiet))]]
    group, credit = credited(rows)
    batch = build_batch([group], [credit], aggregation="token-mean")
    assert batch.num_trained_tokens == sum(row.num_trained_tokens for (row,) in whole) - len(last.ids)
    expected = by_hand(model, rows, first_of(credit), weights_by_hand("token-mean", rows))
    assert_equal(gradient(model, batch), expected)
