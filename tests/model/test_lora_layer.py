"""Adapters on the experts that transformers keeps in one tensor, against the sum of weights and products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.model.lora_layer import AdaptedWeight, adapters_off
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.model_check.small_models import save_small_model

KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "longcat_flash", "llama4_text")
"""Gates and ups in one tensor or interleaved, with biases, transposed, beside a shared expert, and undecorated."""
SCALE = 2.0

Make = Callable[[str], TransformersModel]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a fresh model of a kind; each kind is loaded once."""
    models: dict[str, TransformersModel] = {}

    def copy_of(kind: str) -> TransformersModel:
        if kind not in models:
            folder = tmp_path_factory.mktemp(kind)
            save_small_model(kind, folder)
            model = load_policy(folder, backend="transformers")
            assert isinstance(model, TransformersModel)
            models[kind] = model.requires_grad_(False)
        return copy.deepcopy(models[kind])

    return copy_of


def adapted(model: TransformersModel, targets: tuple[str, ...] | None = None, size: float = 0.05) -> TransformersModel:
    """The model with adapters of random matrices."""
    model.adapt(targets, rank=3, scale=SCALE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def logprobs_of(model: Any, *, weights: dict[str, Tensor] | None = None) -> Tensor:
    """The logprobs `[N, V]` of two packed rows that share a prefix, of the model or with other weights."""
    ids_N = torch.cat([torch.arange(3, 60), torch.arange(3, 43), torch.arange(70, 90)])
    arguments = (ids_N, PackedLayout([57, 60], ids_N=ids_N), lambda hidden, head: hidden @ head.T)
    logits_NV = model(*arguments) if weights is None else torch.func.functional_call(model, weights, arguments)
    return logits_NV.log_softmax(-1)


def plain_sum(weight: Tensor, own: AdaptedWeight) -> Tensor:
    """`W + scale B A` of a weight, by the formula of each projection."""
    sample = next(adapter for adapter in own.adapters.values() if adapter is not None)
    parts = [
        torch.zeros_like(sample.B_OR @ sample.A_RI) if adapter is None else adapter.B_OR @ adapter.A_RI
        for adapter in own.adapters.values()
    ]
    change = torch.cat(parts, -2)
    return weight + SCALE * (change.mT if own.is_transposed else change)


def plain_weights(model: TransformersModel, plain: TransformersModel) -> dict[str, Tensor]:
    """All weights with an adapter, by their names in the plain model."""
    parameters = dict(plain.named_parameters())
    return {f"hf.{own.name}": plain_sum(parameters[f"hf.{own.name}"], own) for own in model.adapted_weights()}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_experts_adapters_are_those_of_the_summed_weights(kind: str, make: Make) -> None:
    model, plain = adapted(make(kind)), make(kind)
    adapters = {name: own for name, own in model.named_parameters() if ".adapter." in name}
    assert any(own.ndim == 3 for own in adapters.values())
    target_N1 = torch.arange(117)[:, None]
    actual_NV, expected_NV = logprobs_of(model), logprobs_of(plain, weights=plain_weights(model, plain))
    torch.testing.assert_close(actual_NV, expected_NV, rtol=0, atol=1e-5)
    gradients = [
        torch.autograd.grad(own_NV.gather(1, target_N1).mean(), list(adapters.values()))
        for own_NV in (actual_NV, expected_NV)
    ]
    for name, own_gradient, expected in zip(adapters, *gradients, strict=True):
        assert expected.abs().max() > 1e-6, name
        torch.testing.assert_close(
            own_gradient, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())), msg=name
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, "granitemoe"])
@torch.no_grad()
def test_fresh_adapters_and_disabled_ones_change_no_bit_and_are_removed(kind: str, make: Make) -> None:
    expected_NV, model = logprobs_of(make(kind)), make(kind)
    model.adapt(None, rank=3, scale=SCALE)
    assert torch.equal(logprobs_of(model), expected_NV)
    adapted_model = adapted(make(kind))
    assert (logprobs_of(adapted_model) - expected_NV).abs().max() > 0.01
    with adapters_off():
        assert torch.equal(logprobs_of(adapted_model), expected_NV)
    assert torch.equal(logprobs_of(copy.deepcopy(adapted_model)), logprobs_of(adapted_model))
    adapted_model.remove_adapters()
    assert torch.equal(logprobs_of(adapted_model), expected_NV)
    assert not list(adapted_model.adapted_weights()) and len(list(adapted_model.parameters())) == len(
        list(make(kind).parameters())
    )


@torch.no_grad()
def test_the_layers_of_gpt2_whose_weights_are_transposed_have_adapters(make: Make) -> None:
    model, plain = adapted(make("gpt2")), make("gpt2")
    owns = list(model.adapted_weights())
    assert {own.name.rpartition(".")[0].rpartition(".")[2] for own in owns} == {"c_attn", "c_proj", "c_fc"}
    assert all(own.is_transposed and not own.is_stack for own in owns)
    actual_NV, expected_NV = logprobs_of(model), logprobs_of(plain, weights=plain_weights(model, plain))
    torch.testing.assert_close(actual_NV, expected_NV, rtol=0, atol=1e-5)
    assert (actual_NV - logprobs_of(plain)).abs().max() > 0.01
    weights = dict(plain.named_parameters())
    for own in owns:
        merged = own.merge(weights[f"hf.{own.name}"], SCALE, lambda tensor: tensor)
        torch.testing.assert_close(merged, plain_sum(weights[f"hf.{own.name}"], own), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "targets", "stacks"),
    [
        ("qwen3_moe", ("up_proj",), {"gate_up_proj"}),
        ("mixtral", ("w1", "w2"), {"gate_up_proj", "down_proj"}),
        ("gpt_oss", ("gate_up_proj",), {"gate_up_proj"}),
        ("qwen3_moe", ("q_proj",), set()),
        ("longcat_flash", ("up_proj", "q_b_proj"), {"gate_up_proj", "weight"}),
    ],
)
@torch.no_grad()
def test_some_projections_of_experts_have_adapters(
    kind: str, targets: tuple[str, ...], stacks: set[str], make: Make
) -> None:
    model, plain = adapted(make(kind), targets), make(kind)
    names = {own.name.rpartition(".")[2] for own in model.adapted_weights()}
    assert names == stacks or (not stacks and names == {"weight"})
    adapters_by_name = {
        name.rpartition(".")[2]: own for own in model.adapted_weights() for name, own in own.adapters.items()
    }
    assert {name for name, own in adapters_by_name.items() if own is not None} == set(targets)
    expected_NV = logprobs_of(plain, weights=plain_weights(model, plain))
    torch.testing.assert_close(logprobs_of(model), expected_NV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_other_products_of_experts_have_the_same_adapters(kind: str, implementation: str, make: Make) -> None:
    model = adapted(make(kind))
    expected_NV = logprobs_of(model)
    adapters = [own for name, own in model.named_parameters() if ".adapter." in name]
    gradients = [torch.autograd.grad(expected_NV[:, 7].mean(), adapters)]
    model.hf.set_experts_implementation(implementation)
    actual_NV = logprobs_of(model)
    torch.testing.assert_close(actual_NV, expected_NV, rtol=0, atol=1e-5)
    gradients.append(torch.autograd.grad(actual_NV[:, 7].mean(), adapters))
    for expected, own_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(own_gradient, expected, rtol=0, atol=1e-5)


def test_recomputed_blocks_have_the_gradients_of_kept_ones(make: Make) -> None:
    model = adapted(make("qwen3_moe"))
    adapters = [own for name, own in model.named_parameters() if ".adapter." in name]
    expected = torch.autograd.grad(logprobs_of(model)[:, 7].mean(), adapters)
    model.set_recompute(True)
    recomputed = torch.autograd.grad(logprobs_of(model)[:, 7].mean(), adapters)
    assert all(torch.equal(left, right) for left, right in zip(recomputed, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("mixtral", ("q_proj", "gate_proj"), r"called gate_proj; its layers are k_proj, .*w1, w2, w3$"),
        ("qwen3_moe", ("gate_up_proj",), r"called gate_up_proj; its layers are down_proj, gate_proj"),
        ("gpt_oss", ("up_proj", "w1"), r"called up_proj or w1; its layers are down_proj, gate_up_proj"),
    ],
)
def test_names_that_no_layer_has_are_refused(kind: str, targets: tuple[str, ...], message: str, make: Make) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind).adapt(targets, rank=3, scale=SCALE)


def test_a_function_that_takes_no_sum_is_refused(make: Make) -> None:
    model = adapted(make("qwen3_moe"))
    experts = next(module for module in model.modules() if type(module).__name__ == "AdaptedQwen3MoeExperts")
    vars(experts)["act_fn"] = lambda _: torch.exp(experts.down_proj)
    with pytest.raises(ConfigError, match=r"experts that call .*exp.* have no adapters"):
        logprobs_of(model)


def test_the_experts_of_a_folder_may_be_copied_without_their_weights(make: Make) -> None:
    model = adapted(make("qwen3_moe"))
    duplicate = model.like()
    assert [name for name, _ in duplicate.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(parameter.is_meta for parameter in duplicate.parameters())
    assert [own.name for own in duplicate.adapted_weights()] == [own.name for own in model.adapted_weights()]


def test_a_saved_folder_has_no_adapter(make: Make, tmp_path: Path) -> None:
    from agentgym.model.model_folder import save_model_folder

    save_model_folder(adapted(make("qwen3_moe")), tmp_path)
    assert torch.equal(logprobs_of(load_policy(tmp_path)), logprobs_of(make("qwen3_moe")))
