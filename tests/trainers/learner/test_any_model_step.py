"""A GRPO step of a model of transformers: its gradient, its routers, and what is reported of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.model.published_weights import named_tensors, published_form
from agentgym.model.routing import FREE, experts_of_routers
from agentgym.model.transformers_folder import load_transformers_model
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner, LearnerConfig, StepStats
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.router import RouterConfig

FAST = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe")
OTHERS = ("gemma3_text", "cohere2", "deepseek_v3", "glm4", "phi3", "lfm2")
NEAR = 1e-5
BALANCE = 0.1


@pytest.fixture
def batch(fresh_batch: Callable[..., TrainingBatch], tiny: Callable[..., Any]) -> TrainingBatch:
    """Groups of replies with a shared prompt; none has the id 0, whose embedding transformers leaves untrained."""
    fresh = fresh_batch(tiny(), shared=40, num_groups=2)
    return replace(fresh, ids_N=fresh.ids_N + 1, target_N=fresh.target_N + 1)


def step_of(
    model: LanguageModel, batch: TrainingBatch, config: LearnerConfig | None = None
) -> tuple[StepStats, dict[str, Tensor]]:
    """Learns a batch by plain descent at a rate of 1; returns what it changed, by published names."""
    learner = Learner(model, replace(config or LearnerConfig(), threads=1), OptimizerConfig(), total_steps=1)

    @torch.no_grad()
    def descend() -> float:
        for parameter in learner.optimizer.parameters:
            if parameter.grad is not None:
                parameter -= parameter.grad
        return 1.0

    learner.optimizer.step = descend  # type: ignore[method-assign]
    before = {name: tensor.detach().clone() for name, tensor in published_views(model)}
    stats = learner.update(replace(batch, sampled_logp_N=(logp := fresh(learner, batch)), old_logp_N=logp))
    learner.close()
    return stats, {name: before[name] - tensor.detach() for name, tensor in published_views(model)}


def fresh(learner: Learner, batch: TrainingBatch) -> Tensor:
    """The policy's own logprobs of the batch's targets, as if it had just sampled them."""
    logp_N = torch.zeros_like(batch.old_logp_N)
    logp_N[batch.mask_N] = learner.logprobs(batch)
    return logp_N


def row_by_row(folder: Path, batch: TrainingBatch, balance: float) -> dict[str, Tensor]:
    """The gradient that transformers computes of the step's loss, each row on its own."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model = load_transformers_model(folder)  # for the names of published tensors
    further = {"output_router_logits": True} if balance else {}
    start = 0
    for length, weight in zip(batch.seqlens, batch.row_weight_B, strict=True):
        row = slice(start, start := start + length)
        outputs = hf(input_ids=batch.ids_N[None, row], use_cache=False, **further)
        logp_TV = outputs.logits[0].log_softmax(-1)
        logp_T = logp_TV.gather(1, batch.target_N[row, None])[:, 0]
        loss = -(batch.weight_N[row] * batch.advantage_N[row] * logp_T).sum()
        (loss + (balance * weight * outputs.aux_loss if balance else 0.0)).backward()
    own = {id(parameter): parameter.grad for parameter in hf.parameters()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in named_tensors(model.hf)}
    tensors |= {name: grad for name, parameter in hf.named_parameters() if (grad := own[id(parameter)]) is not None}
    return published_form(model.hf, tensors)


@pytest.mark.long
@pytest.mark.parametrize("name", FAST)
def test_both_backends_take_the_same_step(name: str, folder_of: Callable[[str], Path], batch: TrainingBatch) -> None:
    folder = folder_of(name)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"sliding_window": None}))
    _, fast = step_of(load_decoder(folder), batch)
    _, slow = step_of(load_transformers_model(folder), batch)
    largest = max(float(change.abs().max()) for change in fast.values())
    assert largest > 1e-3 and fast.keys() == slow.keys()
    for key, change in fast.items():
        assert float((change - slow[key]).abs().max()) < NEAR * largest, key


QUICK = ("qwen3_moe", "gpt_oss", "gemma3_text", "lfm2")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in (*MIXTURES, *OTHERS)]


@pytest.mark.parametrize("name", ALL)
def test_a_step_is_that_of_transformers_row_by_row(
    name: str, folder_of: Callable[[str], Path], batch: TrainingBatch
) -> None:
    balance = BALANCE if name in MIXTURES else 0.0
    config = LearnerConfig(router=RouterConfig(balance=balance))
    _, changes = step_of(load_transformers_model(folder_of(name)), batch, config)
    expected = row_by_row(folder_of(name), batch, balance)
    largest = max(float(change.abs().max()) for change in expected.values())
    assert largest > 1e-3 and changes.keys() == expected.keys()
    for key, change in expected.items():
        assert float((change - changes[key]).abs().max()) < NEAR * largest, key


def test_the_models_configuration_decides_about_the_load_balancing_loss(
    folder_of: Callable[[str], Path], batch: TrainingBatch
) -> None:
    model = load_transformers_model(folder_of("qwen3_moe"))
    assert model.balance_coefficient == 0.0
    model.hf.config.output_router_logits = True
    model.hf.config.router_aux_loss_coef = BALANCE
    assert TransformersModel(model.hf, model.settings).balance_coefficient == BALANCE


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}, {"micro_batch_tokens": 64}])
def test_chosen_experts_are_replayed_with_their_gradient(
    settings: dict[str, Any], folder_of: Callable[[str], Path], batch: TrainingBatch
) -> None:
    """Other experts give another step, the router's own the same one, and cutting the step changes neither."""
    first_N = batch.ids_N + batch.position_N  # the same for the same prefix, which is computed once
    choice_NRK = ((first_N[:, None, None] + torch.arange(4)[:, None] + torch.arange(2)) % 4).short()
    free = torch.full_like(choice_NRK, FREE)
    config = LearnerConfig(router=RouterConfig(balance=BALANCE))
    changes = {}
    for name, experts in (("none", None), ("free", free), ("chosen", choice_NRK)):
        model = load_transformers_model(folder_of("qwen3_moe"))
        recorded = replace(batch, experts_NRK=experts)
        plain = step_of(load_transformers_model(folder_of("qwen3_moe")), recorded, config)
        changes[name] = step_of(model, recorded, replace(config, **settings))
        for key, change in plain[1].items():
            torch.testing.assert_close(changes[name][1][key], change, rtol=0, atol=1e-5)
    same, different = (
        max(float((changes[name][1][key] - change).abs().max()) for key, change in changes["none"][1].items())
        for name in ("free", "chosen")
    )
    assert same < 1e-6 and different > 0.01
    loads = torch.bincount(choice_NRK[:, 0].flatten().long(), minlength=4) / choice_NRK[:, 0].numel()
    assert (router := changes["chosen"][0].router) is not None
    assert router.router_loads[0] == pytest.approx(loads.tolist(), abs=1e-4)


def test_a_record_of_all_layers_is_read_for_those_that_have_a_router(folder_of: Callable[[str], Path]) -> None:
    """SGLang counts every layer, and the first one of DeepSeek is dense."""
    routers = load_transformers_model(folder_of("deepseek_v3")).routers
    assert [router.layer for router in routers] == [1, 2, 3]
    all_NRK = torch.arange(4)[None, :, None].expand(5, 4, 2)
    assert torch.equal(experts_of_routers(routers, all_NRK), all_NRK[:, 1:])
    assert torch.equal(experts_of_routers(routers, all_NRK[:, 1:]), all_NRK[:, 1:])
    with pytest.raises(InvalidTrajectory, match="experts of 2 layers are recorded, and the model has 3 routers"):
        experts_of_routers(routers, all_NRK[:, :2])


def test_frozen_routers_stay_as_they_are(folder_of: Callable[[str], Path], batch: TrainingBatch) -> None:
    model = load_transformers_model(folder_of("mixtral"))
    stats, changes = step_of(model, batch, LearnerConfig(router=RouterConfig(frozen=True, balance=BALANCE)))
    routers = {name: change for name, change in changes.items() if ".gate." in name}
    assert len(routers) == 4 and not any(change.any() for change in routers.values())
    assert any(change.any() for name, change in changes.items() if "experts" in name)
    assert stats.router is not None and 1 <= stats.router.router_load_max <= 4
    assert all(sum(loads) == pytest.approx(1, abs=1e-3) for loads in stats.router.router_loads)
    assert 0 < stats.router.router_entropy < torch.tensor(4.0).log()


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.balance is at least 0"):
        RouterConfig(balance=-1.0)
