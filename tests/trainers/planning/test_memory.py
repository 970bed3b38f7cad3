"""Bytes against those that torch holds, and against sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meta import count_step, model_of, planned_gib
from shapes import PUBLISHED
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.planning.activations import activation_bytes, rows_together
from agentgym.trainers.planning.config import EngineSpec, EpisodeSpec, GpuSpec, PlanConfig
from agentgym.trainers.planning.find_shape import shape_of
from agentgym.trainers.planning.memory import LearnerMemory, engine_memory, learner_memory, micro_batches
from agentgym.trainers.planning.shapes import ModelShape
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

SHAPE = shape_of("Qwen3-8B")
EPISODE = EpisodeSpec(prompt_tokens=1000, reply_tokens=400, tool_tokens=200, turns=4)
GIB = 2**30
SMALL_STEP = PlanConfig(model="8B", tasks=1, group_size=1, learner=LearnerConfig(micro_batch_tokens=16_384))
"""A step of one micro-batch."""


def memory(
    learner: LearnerConfig, *, ranks: int = 1, plan: PlanConfig = SMALL_STEP, name: str = "adamw"
) -> LearnerMemory:
    ray, optimizer = ClusterConfig(learners=ranks), OptimizerConfig(name=name)  # type: ignore[arg-type]
    return learner_memory(SHAPE, replace(plan, learner=learner, ray=ray, optimizer=optimizer))


def saved_bytes(model: Decoder, lengths: list[int], ids: torch.Tensor, *, shares: bool) -> int:
    """What autograd keeps of a forward pass, each storage once, without the weights and what only lies around."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    layout = PackedLayout(lengths, ids_N=ids if shares else None)
    saved: dict[int, tuple[int, object]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in addresses:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive: an address is not used twice
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden_states(ids, layout)
    return sum(size for size, _ in saved.values())


@pytest.mark.parametrize("shares", [False, True])
def test_activations_are_what_autograd_keeps(shares: bool, tmp_path: Path) -> None:
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
    model = Decoder(config).initialize(0)
    save_model_folder(model, tmp_path)
    shape = shape_of(str(tmp_path))
    rows = 4 if shares else 1
    episode = EpisodeSpec(prompt_tokens=256, reply_tokens=128, tool_tokens=0, turns=1)
    prompt = torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(0))
    own = torch.randint(0, 64, (rows, 128), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([torch.cat([prompt, reply]) for reply in own])
    num_bytes = saved_bytes(model, [384] * rows, ids, shares=shares)
    computed = 256 + rows * 128
    learner = LearnerConfig(micro_batch_tokens=computed, dtype="float32")
    plan = PlanConfig(model="tiny", episode=episode, learner=learner, tasks=1, group_size=rows)
    assert activation_bytes(shape, plan) == (pytest.approx(num_bytes, rel=0.1), 0)


def test_a_learner_on_one_gpu_by_hand() -> None:
    memory_plan = memory(LearnerConfig(micro_batch_tokens=16_384, dtype="float32"))
    parameters = 8_190_735_360
    assert (memory_plan.weights, memory_plan.gradients, memory_plan.optimizer) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    assert memory_plan.resting == 12 * parameters


def test_the_most_is_that_of_a_moment() -> None:
    """Gradients begin as activations go, unless further micro-batches add to them."""
    memory_plan = memory(LearnerConfig(micro_batch_tokens=16_384))
    assert memory_plan.total - memory_plan.resting - memory_plan.runtime == max(
        memory_plan.activations + memory_plan.logits, memory_plan.gradients
    )
    more = memory(LearnerConfig(micro_batch_tokens=16_384), plan=replace(SMALL_STEP, tasks=16))
    assert more.total == sum(more.parts.values())


def test_bfloat16_weights_have_float32_copies_and_gradients() -> None:
    memory_plan = memory(LearnerConfig(micro_batch_tokens=16_384))
    parameters = SHAPE.num_parameters
    assert (memory_plan.weights, memory_plan.gradients, memory_plan.optimizer) == (
        6 * parameters,
        4 * parameters,
        8 * parameters,
    )
    assert memory_plan.activations < memory(LearnerConfig(dtype="float32", micro_batch_tokens=16_384)).activations


def test_shards_are_equal_parts_and_whole_gradients_are_not() -> None:
    single = memory(LearnerConfig(micro_batch_tokens=16_384, dtype="float32"))
    many = memory(LearnerConfig(micro_batch_tokens=16_384), ranks=8)
    assert many.weights == single.weights / 8
    assert many.optimizer == single.optimizer / 8
    assert many.gradients == single.gradients / 8
    steps = replace(SMALL_STEP, tasks=64, group_size=8)
    whole = memory(LearnerConfig(), ranks=8, plan=steps)
    assert whole.gradients == single.gradients
    cut = memory(LearnerConfig(fsdp=FsdpConfig(gradients="sharded")), ranks=8, plan=steps)
    assert cut.gradients == many.gradients


def test_ranks_gather_layers_in_the_type_of_their_passes() -> None:
    half = memory(LearnerConfig(), ranks=8)
    assert half.gathered == 2 * (2 * SHAPE.layer_parameters + SHAPE.head_parameters)
    assert memory(LearnerConfig(dtype="float32"), ranks=8).gathered == 2 * half.gathered
    memory_plan = memory(LearnerConfig(fsdp=FsdpConfig(reshard_after_forward=False)), ranks=8)
    assert memory_plan.gathered == 2 * SHAPE.num_parameters
    assert memory(LearnerConfig()).gathered == 0


def test_shards_in_cpu_memory_take_none_of_a_gpu() -> None:
    memory_plan = memory(LearnerConfig(fsdp=FsdpConfig(cpu_offload=True, gradients="sharded")), ranks=8)
    assert (memory_plan.weights, memory_plan.gradients, memory_plan.optimizer) == (0, 0, 0)


def test_adapters_have_no_gradients_of_the_weights_under_them() -> None:
    memory_plan = memory(LearnerConfig(lora=LoraConfig(rank=16), micro_batch_tokens=16_384, dtype="bfloat16"))
    adapters = SHAPE.adapter_parameters(16)
    assert memory_plan.weights == 2 * SHAPE.num_parameters + 6 * adapters
    assert memory_plan.reference == 2 * SHAPE.num_parameters  # the base; the run's model is merged with the adapters
    assert (memory_plan.gradients, memory_plan.optimizer) == (4 * adapters, 8 * adapters)
    ranks = memory(LearnerConfig(lora=LoraConfig(rank=16, target_modules=("q_proj",))), ranks=8)
    assert ranks.weights == 4 * (SHAPE.num_parameters + SHAPE.adapter_parameters(16, ("q_proj",))) / 8
    assert ranks.reference == 0


def test_a_kl_term_keeps_the_first_weights_and_a_critic_is_a_second_model() -> None:
    plain, parameters = memory(LearnerConfig(), ranks=4), SHAPE.num_parameters
    assert memory(LearnerConfig(kl=KLConfig(coefficient=0.1)), ranks=4).reference == parameters
    critic = memory(LearnerConfig(critic=CriticConfig(trunk="own")), ranks=4)
    assert (critic.weights, critic.optimizer) == (2 * plain.weights, 2 * plain.optimizer)
    both = LearnerConfig(critic=CriticConfig(trunk="own"), kl=KLConfig(coefficient=0.1))
    apart = ClusterConfig(learners=4, references=1, critics=1)
    assert learner_memory(SHAPE, replace(SMALL_STEP, learner=both, ray=apart)) == plain


def test_muon_keeps_one_number_of_a_matrix_and_two_of_the_rest() -> None:
    adamw, muon = (memory(LearnerConfig(), name=name).optimizer for name in ("adamw", "muon"))
    matrices = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12_288)
    assert adamw - muon == 4 * matrices


def test_checkpointing_keeps_a_state_a_layer() -> None:
    keeps, again = (
        memory(LearnerConfig(micro_batch_tokens=16_384, activation_checkpointing=on)).activations
        for on in (False, True)
    )
    assert again < keeps / 5


GPU = Path(__file__).parents[3] / "benchmarks" / "gpu"
"""`h200/*.jsonl` has what a GPU has used at most in steps of the learner."""
KINDS = {
    "single": (2, 8, 512, 1050),
    "turns": (8, 1, 1, 2047),
    "long": (1, 1, 1, 16_383),
    "verylong": (1, 1, 1, 32_767),
}
"""Tasks, rows of each, tokens of a prompt and of a reply, of the workloads there."""
SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
"""The sizes of Qwen3."""


def measured(*names: str) -> list[dict[str, Any]]:
    cases = [json.loads(line) for name in names for line in (GPU / "h200" / f"{name}.jsonl").read_text().splitlines()]
    return [case for case in cases if case.get("peak_gb") and case.get("attention") != "blocks"]


def most_gb(case: dict[str, Any], shape: ModelShape) -> float:
    """The prediction for a step, without the runtime, and without the model that a run merges adapters into."""
    tasks, group_size, prompt, reply = KINDS[case.get("kind", "single")]
    names = ("micro_batch_tokens", "activation_checkpointing", "dtype")
    settings = {"micro_batch_tokens": 16_384, **{name: case[name] for name in names if name in case}}
    learner = LearnerConfig(**settings, lora=LoraConfig(rank=case.get("lora_rank", 0)))
    episode = EpisodeSpec(prompt_tokens=prompt, reply_tokens=reply, tool_tokens=0, turns=1)
    plan = PlanConfig(model="", tasks=tasks, group_size=group_size, episode=episode, learner=learner)
    memory_plan = learner_memory(shape, plan)
    return (memory_plan.total - memory_plan.runtime - memory_plan.reference) / 1e9


@pytest.mark.parametrize(
    "case", measured("learning", "sizes"), ids=lambda case: f"{case['shape']}-{case.get('kind', 'single')}"
)
def test_the_most_is_near_what_a_gpu_has_used(case: dict[str, Any]) -> None:
    assert most_gb(case, shape_of(case["shape"])) == pytest.approx(case["peak_gb"], rel=0.08)


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("case", measured("published"), ids=lambda case: f"{case['model']}-{case['kind']}")
def test_that_of_other_architectures_and_of_adapters_is_near_too(case: dict[str, Any], tmp_path: Path) -> None:
    model = case["model"]
    if model not in SIZES:
        family, sizes = PUBLISHED[model]
        AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path)
    shape = shape_of(model if model in SIZES else str(tmp_path))
    assert shape.num_parameters == pytest.approx(case["parameters"], rel=1e-4)
    assert most_gb(case, shape) == pytest.approx(case["peak_gb"], rel=0.1)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("name", "backend"), [("8B", "fast"), ("32B", "fast"), ("8B", "transformers"), ("qwen3-30b-a3b", "transformers")]
)
def test_what_a_pass_keeps_is_near_what_is_counted_of_it(name: str, backend: str) -> None:
    counted = count_step(model_of(name, backend), [4096] * 4)["forward"].peak_bytes
    assert planned_gib(name, backend, 4, 4096) == pytest.approx(counted / GIB, rel=0.08)


def test_gpus_that_share_rows_share_their_activations() -> None:
    whole, half = (memory(LearnerConfig(mesh=MeshConfig(sequence=size)), ranks=2).activations for size in (1, 2))
    assert half == whole / 2


@pytest.mark.parametrize(
    ("tasks", "group_size", "tokens", "parts"),
    [(1, 1, 3200, 1), (4, 1, 3200, 4), (2, 8, 18_600, 2), (2, 8, 37_200, 1)],
)
def test_micro_batches_of_a_step_by_hand(tasks: int, group_size: int, tokens: int, parts: int) -> None:
    learner = LearnerConfig(micro_batch_tokens=tokens)  # 1,000 tokens of a prompt and 8 x 2,200 after it: 18,600
    plan = PlanConfig(model="8B", tasks=tasks, group_size=group_size, episode=EPISODE, learner=learner)
    assert micro_batches(plan) == parts


@pytest.mark.parametrize(("tokens", "rows"), [(100, 1), (4000, 1), (5400, 2), (100_000, 8)])
def test_rows_of_a_group_that_a_micro_batch_holds(tokens: int, rows: int) -> None:
    assert EPISODE.tokens == 3200
    learner = LearnerConfig(micro_batch_tokens=tokens)
    assert rows_together(PlanConfig(model="8B", group_size=8, episode=EPISODE, learner=learner)) == rows


def test_an_engine_by_hand() -> None:
    memory_plan = engine_memory(SHAPE, replace(SMALL_STEP, gpu=GpuSpec(memory_gib=80)))
    assert memory_plan.weights == 2 * 8_190_735_360
    assert (
        memory_plan.token == 147_456
    )  # bytes: 36 layers, 8 heads of keys and as many of values, 128 wide, in bfloat16
    assert memory_plan.cache == pytest.approx(72 * GIB - 3 * GIB - memory_plan.weights)
    assert memory_plan.sequences(3200) == int(memory_plan.cache // (147_456 * 3200))


def test_more_gpus_than_heads_hold_copies_of_keys_and_values() -> None:
    tokens = [
        engine_memory(SHAPE, replace(SMALL_STEP, engine=EngineSpec(tensor_parallel=gpus))).token for gpus in (8, 16)
    ]
    assert tokens == [147_456 / 8, 147_456 / 8]
