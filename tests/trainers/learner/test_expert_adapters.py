"""Learners whose adapters are on experts too: what they publish, sample, save and export."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.engines.local.batch_invariance import batch_invariance_findings
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.transformers_step import TransformersStep
from agentgym.engines.protocol import Completion, Sampling
from agentgym.errors import ConfigError
from agentgym.model.model_folder import published_views
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.export import write_adapter
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.lora import Adapters
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.router import RouterConfig

Fresh = Callable[..., TrainingBatch]
FolderOf = Callable[[str], Path]

LORA = LoraConfig(rank=4, alpha=8.0)
STEP = OptimizerConfig(learning_rate=3e-4, warmup_steps=1)


def learner_of(folder: Path, **settings: Any) -> Learner:
    """A learner that keeps a model with the adapters merged in, as a run does."""
    config = LearnerConfig(**{"threads": 1, "lora": LORA, **settings})
    return Learner(load_policy(folder), config, STEP, total_steps=8, reference=load_policy(folder))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_published_weights_of_each_expert_have_its_adapter(kind: str, folder_of: FolderOf, fresh_batch: Fresh) -> None:
    learner = learner_of(folder_of(kind), kl=KLConfig(coefficient=0.1))
    assert learner.adapters is not None
    merged = learner.adapters.published
    assert isinstance(merged, TransformersModel)
    batch = fresh_batch(merged, num_groups=2, shared=20)
    first = {name: tensor.clone() for name, tensor in published_views(merged)}
    stats = [learner.update(batch) for _ in range(3)]
    assert stats[0].kl == 0 and stats[-1].kl > 1e-4
    assert all(torch.equal(tensor, first[name]) for name, tensor in published_views(learner.model)), "the base stays"
    changed = dict(learner.weights())
    experts = {name for name in first if ".experts." in name and not name.endswith("_bias")}
    assert experts and experts <= changed.keys()
    for name, tensor in published_views(merged):
        assert torch.equal(tensor, changed.get(name, first[name]))
    loads_LX = sum(torch.tensor(step.router.router_loads) for step in stats if step.router is not None)
    assert isinstance(loads_LX, Tensor)
    used = (loads_LX[:-1] > 0).nonzero().tolist()  # in the last layer those of trained targets alone learn
    assert len(used) > 8
    for layer, expert in used:
        for name in (name for name in experts if f"layers.{layer}." in name):
            new, old = changed[name], first[name]
            if new.ndim == 3:
                assert not torch.equal(new[expert], old[expert]), (name, expert)
            elif f"experts.{expert}." in name:
                assert not torch.equal(new, old), name
    alone = learner_of(folder_of(kind), lora=LoraConfig())
    alone.model.load_state_dict(merged.state_dict())
    torch.testing.assert_close(learner.logprobs(batch), alone.logprobs(batch), rtol=0, atol=1e-5)
    assert (learner.logprobs(batch) - batch.old_logp_N[batch.mask_N]).abs().max() > 0.01


@pytest.mark.long
def test_replies_of_adapted_experts_have_the_learners_logprobs(folder_of: FolderOf, fresh_batch: Fresh) -> None:
    learner = learner_of(folder_of("qwen3_moe"))
    assert learner.adapters is not None
    sampled = learner.adapters.published
    assert isinstance(sampled, TransformersModel)
    batch = fresh_batch(sampled, num_groups=2)
    for _ in range(3):
        learner.update(batch)
    assert batch_invariance_findings(TransformersStep(sampled, SlotCache(sampled, 6, 192))) == []
    prompts = [list(range(3, 3 + size)) for size in (30, 12, 21)]

    async def play() -> list[Completion]:
        engine = LocalEngine(sampled, LocalEngineConfig(num_slots=3, window=64, max_step_tokens=32))
        try:
            sampling = Sampling(max_tokens=12, seed=7, stop_ids=())
            return await asyncio.gather(*(engine.generate(ids, sampling, session=str(ids)) for ids in prompts))
        finally:
            await engine.close()

    for prompt, reply in zip(prompts, asyncio.run(play()), strict=True):
        ids_T = torch.tensor([*prompt, *reply.ids])
        logp_T1 = scores_of(learner.model, ids_T)[len(prompt) - 1 : -1].gather(1, ids_T[len(prompt) :, None])
        torch.testing.assert_close(torch.tensor(reply.logprobs), logp_T1[:, 0], rtol=0, atol=1e-5)


@torch.no_grad()
def scores_of(model: Any, ids_T: Tensor) -> Tensor:
    """The logprobs `[T, V]` of a sequence."""
    scores_TV: Tensor = model.logits(model.hidden_states(ids_T, PackedLayout([len(ids_T)]))).log_softmax(-1)
    return scores_TV


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"router": RouterConfig(frozen=True, balance=0.1)},
        {"router": RouterConfig(replay=True)},
    ],
    ids=["recomputed", "frozen-routers", "replayed"],
)
def test_a_saved_state_goes_on_to_the_bit(settings: dict[str, Any], folder_of: FolderOf, fresh_batch: Fresh) -> None:
    learner = learner_of(folder_of("qwen3_moe"), **settings)
    batch = fresh_batch(learner.model, num_groups=2)
    if "router" in settings and settings["router"].replay:
        choice_NRK = torch.arange(batch.num_tokens * 4 * 2).view(-1, 4, 2) % 4
        batch = replace(batch, experts_NRK=choice_NRK)
    learner.update(batch)
    state, between = copy.deepcopy(learner.state_dict()), copy.deepcopy(dict(learner.weights()))
    learner.update(batch)
    again = learner_of(folder_of("qwen3_moe"), **settings)
    again.load_state_dict(state)
    assert all(torch.equal(tensor, between[name]) for name, tensor in again.weights())
    again.update(batch)
    assert all(
        torch.equal(left, right) for (_, left), (_, right) in zip(again.weights(), learner.weights(), strict=True)
    )
    assert not any("mlp.gate." in name for name in between), "routers have no adapter"


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_either_optimizer_trains_experts(name: Any, folder_of: FolderOf, fresh_batch: Fresh) -> None:
    config = LearnerConfig(threads=1, lora=replace(LORA, target_modules=("up_proj", "down_proj")))
    model = load_policy(folder_of("qwen3_moe"))
    batch = fresh_batch(model)
    learner = Learner(model, config, replace(STEP, name=name), total_steps=8)
    losses = [learner.update(batch).loss for _ in range(4)]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3_moe", None),
        ("mixtral", None),
        ("mixtral", ("w1", "w2")),
        ("gpt_oss", None),
        ("llama4_text", None),
        ("deepseek_v3", None),
        ("qwen3_moe", ("down_proj",)),
    ],
)
@torch.no_grad()
def test_peft_loads_an_exported_adapter_and_computes_what_the_merged_model_computes(
    kind: str, targets: tuple[str, ...] | None, folder_of: FolderOf, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = load_policy(folder_of(kind))
    adapters = Adapters.of(model, None, replace(LORA, **({} if targets is None else {"target_modules": targets})))
    generator, ids_T = torch.Generator().manual_seed(1), torch.arange(7, 60)
    first_TV = scores_of(model, ids_T)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    write_adapter(adapters.state_dict(), tmp_path, None, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder_of(kind), dtype=torch.float32)
    theirs_TV = PeftModel.from_pretrained(base, tmp_path)(ids_T[None]).logits[0].log_softmax(-1)
    ours_TV, merge_TV = scores_of(model, ids_T), scores_of(adapters.merge(), ids_T)
    torch.testing.assert_close(theirs_TV, merge_TV, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours_TV, merge_TV, rtol=0, atol=1e-5)
    assert (ours_TV - first_TV).abs().max() > 0.05


def test_names_of_experts_are_settings_and_those_of_another_model_are_refused(
    folder_of: FolderOf, tiny: Callable[..., Any]
) -> None:
    config = LoraConfig(rank=4, target_modules=("q_proj", "w1"))
    Adapters.of(load_policy(folder_of("mixtral")), None, config)
    with pytest.raises(ConfigError, match="no layer to adapt that is called w1"):
        Adapters.of(load_policy(folder_of("qwen3_moe")), None, config)
    with pytest.raises(ConfigError, match="no layer that is called w1; its layers are q_proj"):
        Adapters.of(tiny(), None, config)
