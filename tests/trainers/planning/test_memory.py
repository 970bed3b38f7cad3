"""Bytes against those that torch holds, and against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.planning.config import EngineSpec, EpisodeSpec, LearnerSpec
from agentgym.trainers.planning.memory import (
    activation_bytes,
    engine_memory,
    layer_floats,
    learner_memory,
    rows_together,
)
from agentgym.trainers.planning.shapes import SHAPES, ModelShape

SHAPE = SHAPES["Qwen3-8B"]
EPISODE = EpisodeSpec(prompt_tokens=1000, reply_tokens=400, tool_tokens=200, turns=4)
GIB = 2**30


def saved_bytes(model: Decoder, lengths: list[int], ids: torch.Tensor, *, shares: bool) -> int:
    """What autograd keeps of a forward pass, each storage once, without the weights and what only lies around."""
    known = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    layout = PackedLayout(lengths, ids_N=ids if shares else None)
    found: dict[int, tuple[int, object]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive: an address is not used twice
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden_states(ids, layout)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("shares", [False, True])
def test_activations_are_what_autograd_keeps(shares: bool) -> None:
    config = DecoderConfig(
        family="qwen3",
        vocab_size=64,
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_width=32,
        ffn_width=384,
        context_window=1024,
        qk_norm=True,
    )
    shape = ModelShape(
        name="tiny",
        vocab_size=64,
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_width=32,
        ffn_width=384,
        tied=True,
        qk_norm=True,
    )
    rows = 4 if shares else 1
    episode = EpisodeSpec(prompt_tokens=256, reply_tokens=128, tool_tokens=0, turns=1)
    prompt = torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(0))
    own = torch.randint(0, 64, (rows, 128), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([torch.cat([prompt, one]) for one in own])
    kept = saved_bytes(Decoder(config).initialize(0), [384] * rows, ids, shares=shares)
    computed = 256 + rows * 128
    spec = LearnerSpec(precision="float32", activation_checkpointing=False, micro_batch_tokens=computed)
    predicted = activation_bytes(shape, spec, episode, rows)
    working = layer_floats(shape, computed, rows * 384) * 4  # of the backward pass, in which nothing is kept yet
    assert predicted - working == pytest.approx(kept, rel=0.1)


def test_a_learner_on_one_gpu_by_hand() -> None:
    spec = LearnerSpec(precision="mixed")
    found = learner_memory(SHAPE, spec, EPISODE, ranks=1, group_size=8, parts=1)
    parameters = 8_190_735_360
    assert (found.weights, found.gradients, found.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert found.total == sum(found.parts.values())
    assert found.resting == 12 * parameters


def test_shards_are_equal_parts_and_whole_gradients_are_not() -> None:
    spec = LearnerSpec()
    one, many = (learner_memory(SHAPE, spec, EPISODE, ranks=ranks, group_size=8, parts=1) for ranks in (1, 8))
    assert many.weights == one.weights / 8
    assert many.optimizer == one.optimizer / 8
    assert many.gradients == one.gradients / 8
    whole = learner_memory(SHAPE, spec, EPISODE, ranks=8, group_size=8, parts=3)
    assert whole.gradients == one.gradients
    cut = learner_memory(SHAPE, replace(spec, gradients="sharded"), EPISODE, ranks=8, group_size=8, parts=3)
    assert cut.gradients == many.gradients


def test_adapters_have_no_gradients_of_the_weights_they_stand_on() -> None:
    found = learner_memory(SHAPE, LearnerSpec(lora_rank=16), EPISODE, ranks=1, group_size=8, parts=1)
    adapters = SHAPE.adapter_parameters(16)
    assert found.weights == 2 * SHAPE.num_parameters + 4 * adapters
    assert (found.gradients, found.optimizer) == (4 * adapters, 8 * adapters)


def test_muon_keeps_one_number_of_a_matrix_and_two_of_the_rest() -> None:
    adamw, muon = (
        learner_memory(SHAPE, LearnerSpec(optimizer=name), EPISODE, ranks=1, group_size=8, parts=1).optimizer
        for name in ("adamw", "muon")
    )
    matrices = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12_288)
    assert adamw - muon == 4 * matrices


def test_checkpointing_keeps_a_state_a_layer() -> None:
    keeps, again = (
        activation_bytes(SHAPE, LearnerSpec(activation_checkpointing=on), EPISODE, 8) for on in (False, True)
    )
    assert again < keeps / 5


def test_gpus_that_share_rows_share_their_activations() -> None:
    one, two = (activation_bytes(SHAPE, LearnerSpec(sequence_parallel=size), EPISODE, 8) for size in (1, 2))
    assert two == one / 2


@pytest.mark.parametrize(("tokens", "rows"), [(100, 1), (4000, 1), (5400, 2), (100_000, 8)])
def test_rows_of_a_group_that_a_micro_batch_holds(tokens: int, rows: int) -> None:
    assert EPISODE.tokens == 3200
    assert rows_together(LearnerSpec(micro_batch_tokens=tokens), EPISODE, 8) == rows


def test_an_engine_by_hand() -> None:
    found = engine_memory(SHAPE, EngineSpec(), gpus=1, memory=80 * GIB, resting=0, runtime=3 * GIB)
    assert found.weights == 2 * 8_190_735_360
    assert found.token == 147_456  # bytes: 36 layers, 8 heads of keys and as many of values, 128 wide, in bfloat16
    assert found.cache == pytest.approx(72 * GIB - 3 * GIB - found.weights)
    assert found.sequences(3200) == int(found.cache // (147_456 * 3200))


def test_more_gpus_than_heads_hold_copies_of_keys_and_values() -> None:
    tokens = [
        engine_memory(SHAPE, EngineSpec(), gpus=gpus, memory=80 * GIB, resting=0, runtime=0).token for gpus in (8, 16)
    ]
    assert tokens == [147_456 / 8, 147_456 / 8]
