"""Rates and weight decays by names and by depth: what the first step moves, and a resumed run that is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views, save_model_folder
from agentgym.model.policy import load_policy
from agentgym.trainers.learner.lora import adapt
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
STEP = OptimizerConfig(learning_rate=0.01, warmup_steps=1, max_grad_norm=1e9)


@pytest.fixture(params=["decoder", "transformers"])
def model(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Any) -> LanguageModel:
    """The same weights in both forms."""
    own = tiny(tied=False)
    if request.param == "decoder":
        return own
    save_model_folder(own, tmp_path)
    return load_policy(tmp_path, backend="transformers")


def moves(model: LanguageModel, config: OptimizerConfig) -> dict[str, float]:
    """How far each published tensor is moved by the first AdamW step on gradients of 1, as a share of the rate."""
    before = {name: view.detach().clone() for name, view in published_views(model)}
    take_step(model, PolicyOptimizer(model, config, total_steps=10))
    moved = {name: (before[name] - view.detach()) / config.learning_rate for name, view in published_views(model)}
    assert all((move - move.mean()).abs().max() < 1e-3 for move in moved.values())
    return {name: round(float(move.mean()), 4) for name, move in moved.items()}


def take_step(model: nn.Module, optimizer: PolicyOptimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_each_layer_has_a_smaller_rate_than_the_one_above_it(model: LanguageModel) -> None:
    moved = moves(model, replace(STEP, layer_decay=0.5))
    assert moved["lm_head.weight"] == moved["model.norm.weight"] == pytest.approx(1.0, abs=1e-3)
    assert moved["model.layers.1.self_attn.k_proj.weight"] == pytest.approx(0.5, abs=1e-3)
    assert moved["model.layers.1.input_layernorm.weight"] == pytest.approx(0.5, abs=1e-3)
    assert moved["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.25, abs=1e-3)
    assert moved["model.embed_tokens.weight"] == pytest.approx(0.125, abs=1e-3)


def test_the_first_pattern_in_a_name_sets_its_rate_and_0_freezes(model: LanguageModel) -> None:
    rates = {r"layers\.0\.": 0.0, "mlp": 2.0, "layers": 0.5}
    moved = moves(model, replace(STEP, rates=rates))
    assert {moved[name] for name in moved if ".layers.0." in name} == {0.0}
    assert moved["model.layers.1.mlp.down_proj.weight"] == pytest.approx(2.0, abs=1e-3)
    assert moved["model.layers.1.self_attn.q_proj.weight"] == pytest.approx(0.5, abs=1e-3)
    assert moved["lm_head.weight"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_weight_decay_leaves_out_what_has_none(name: str, tiny: Tiny) -> None:
    model = tiny()
    settings = {"weight_decay": 0.5} if name == "sgd" else {}
    config = replace(STEP, name=name, weight_decay=0.5, settings=settings, weight_decays={"norm|bias": 0.0})
    optimizer = PolicyOptimizer(model, config, total_steps=10)
    before = {own: parameter.detach().clone() for own, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for own, parameter in model.named_parameters():
        expected = before[own] if "norm" in own else before[own] * (1 - 0.005)
        torch.testing.assert_close(parameter.detach(), expected)


def test_adapters_have_the_rates_of_their_layers(tiny: Tiny) -> None:
    model = adapt(tiny(), LoraConfig(rank=2))
    optimizer = PolicyOptimizer(model, replace(STEP, layer_decay=0.5, rates={"q_proj": 0.1}), total_steps=10)
    (part,) = optimizer._parts
    rates = {parameter: group["rate"] for group in part.param_groups for parameter in group["params"]}
    rates_by_name = {name: rates[parameter] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {rate for name, rate in rates_by_name.items() if "layers.1." in name} == {0.5, 0.05}
    assert {rate for name, rate in rates_by_name.items() if "layers.0." in name} == {0.25, 0.025}


def test_without_them_the_groups_and_the_state_are_as_ever(tiny: Tiny) -> None:
    (group,) = PolicyOptimizer(tiny(), STEP, total_steps=10)._parts[0].param_groups
    assert "rate" not in group


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_run_goes_on_bitwise(name: str, tiny: Tiny) -> None:
    config = replace(STEP, name=name, layer_decay=0.8, rates={"mlp": 0.3}, weight_decay=0.1, weight_decays={"norm": 0})
    whole = tiny()
    optimizer = PolicyOptimizer(whole, config, total_steps=6)
    take_step(whole, optimizer)
    resumed = copy.deepcopy(whole)
    second_optimizer = PolicyOptimizer(resumed, config, total_steps=6)
    second_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, its in ((whole, optimizer), (resumed, second_optimizer)):
        take_step(model, its)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rates": {"embd": 0.1}}, "no trained parameter has 'embd' in its name; names are such as model.embed_tokens"),
        ({"rates": {"q_proj": 0.1}}, r"q_proj.weight, .* are one tensor here, and q_proj has a part of them"),
        ({"name": "adafactor", "weight_decays": {"norm": 0.0}}, None),
    ],
)
def test_a_pattern_that_cannot_be_followed_is_an_error(tiny: Tiny, settings: Any, words: str | None) -> None:
    config = replace(STEP, **settings)
    if words is None:
        PolicyOptimizer(tiny(), config, total_steps=1)
    else:
        with pytest.raises(ConfigError, match=words):
            PolicyOptimizer(tiny(), config, total_steps=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer_decay": 0.0}, r"layer_decay must be in \(0, 1\]"),
        ({"rates": {"(": 1.0}}, "'\\(' is not a regular expression"),
        ({"rates": {"a": -1.0}}, "numbers of at least 0, got -1.0 for 'a'"),
        ({"weight_decays": {"a": float("nan")}}, "numbers of at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(**settings)
