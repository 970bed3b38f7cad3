"""What an update computes: tokens padded, packed and shared, and operations, against PyTorch's own counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.batch.batch import TrainingBatch, plain_batch
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.speed.work import forward_flops, update_work
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task


def episode(prompt: list[int], reply: list[int], member: int) -> Trajectory:
    spans = (
        TokenSpan(tuple(prompt), Source.PROMPT),
        TokenSpan(tuple(reply), Source.POLICY, (-1.0,) * len(reply), (0,) * len(reply)),
    )
    turn = Turn(Message("assistant", "x"), 1.0)
    ended = Status.COMPLETED, StopReason.TERMINATED
    return Trajectory(Task("TextGame-v0", 1), f"{member}", member, (Row(spans),), (turn,), *ended)


def two_rows() -> TrainingBatch:
    """A prompt of 50 in common, and replies of 11 and 31: rows of 60 and 80 entries."""
    prompt = list(range(2, 32)) + list(range(2, 22))
    return plain_batch([episode(prompt, [33] * 11, 0), episode(prompt, [34] * 31, 1)])


def test_two_rows_with_a_prompt_in_common(tiny: Callable[..., Decoder]) -> None:
    work = update_work(two_rows(), LearnerConfig(), tiny())
    assert (work.trained_tokens, work.padded_tokens, work.packed_tokens) == (42, 160, 140)
    assert work.computed_tokens == 140 - 50


def test_rows_in_micro_batches_of_their_own_share_and_pad_nothing_and_epochs_count(
    tiny: Callable[..., Decoder],
) -> None:
    work = update_work(two_rows(), LearnerConfig(micro_batch_tokens=60, epochs=3), tiny())
    assert (work.padded_tokens, work.packed_tokens, work.computed_tokens) == (420, 420, 420)
    assert work.trained_tokens == 126
    parts = update_work(two_rows(), LearnerConfig(minibatches=2), tiny())
    assert (parts.padded_tokens, parts.computed_tokens) == (140, 140)


def test_the_portions_are_the_micro_batches_that_the_learner_computes(
    tiny: Callable[..., Decoder], fresh_batch: Callable[..., TrainingBatch]
) -> None:
    batch = fresh_batch(tiny(), num_groups=4)
    portions = [part.seqlens for part in batch.split(40)]
    assert [tuple(batch.seqlens[row] for row in rows) for rows in batch.portions(40)] == portions
    assert len(portions) > 1


def test_operations_are_those_that_torch_counts_in_whole_rows() -> None:
    shape = DecoderConfig(
        family="llama",
        vocab_size=50,
        width=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_width=8,
        ffn_width=48,
        context_window=64,
    )
    model = Decoder(shape).initialize(0).double()  # in float64 the products are torch's own, which it counts
    lengths, ids_N = [7, 12], torch.arange(19)
    with FlopCounterMode(display=False) as counter:
        model.logits(model.hidden_states(ids_N, PackedLayout(lengths)))
    counted = counter.get_total_flops()
    padding = 32 - 19  # rows that fill a product up
    projections = 2 * 32 * (2 * 32 + 2 * 16 + 3 * 48) * padding * shape.num_layers
    # On CPU it counts no attention: for each token and key a product of queries and keys, and one of shares and values.
    pairs = sum(1 for length in lengths for token in range(length) for key in range(length) if key <= token)
    attention = shape.num_layers * shape.num_heads * pairs * (2 * 2 * shape.head_width)
    assert forward_flops(shape, lengths, 19) == counted - projections + attention


def test_an_update_counts_forward_and_twice_for_backward(tiny: Callable[..., Decoder]) -> None:
    shape = tiny().config
    batch = two_rows()
    forward = forward_flops(shape, (60, 80), 42)
    assert update_work(batch, LearnerConfig(), tiny()).flops == 3 * forward
    adapters = LearnerConfig(lora=LoraConfig(rank=2))
    assert update_work(batch, adapters, tiny()).flops == 2 * forward, "frozen weights take no gradient"


def test_the_learner_computes_the_tokens_that_are_counted(
    tiny: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = tiny(), []
    hidden = model.hidden_states

    def counting(ids_N: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        seen.append(layout.num_tokens)
        return hidden(ids_N, layout)

    monkeypatch.setattr(model, "hidden_states", counting)
    config = LearnerConfig(epochs=2, threads=1)
    learner = Learner(model, config, OptimizerConfig(), total_steps=1)
    learner.update(two_rows())
    learner.close()
    assert sum(seen) == update_work(two_rows(), config, model).computed_tokens
