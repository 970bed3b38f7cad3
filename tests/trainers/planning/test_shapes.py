"""Shapes against transformers' own models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meta import count_step
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from agentgym.errors import ConfigError
from agentgym.model.policy import empty_policy
from agentgym.trainers.planning.activations import layer_floats
from agentgym.trainers.planning.counted_shape import counted_shape
from agentgym.trainers.planning.find_shape import shape_of
from agentgym.trainers.planning.shapes import SHAPES, ModelShape

PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen2.5-7B": 7_615_616_512,
}


def config_of(shape: ModelShape, layers: int | None = None) -> Any:
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    mixture: dict[str, Any] = {}
    if experts := shape.experts:
        family, mixture = "qwen3_moe", {"num_experts": experts.number, "num_experts_per_tok": experts.chosen}
        mixture["moe_intermediate_size"] = experts.width
    return AutoConfig.for_model(
        family,
        **mixture,
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        num_hidden_layers=layers or shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_width,
        intermediate_size=shape.ffn_width,
        tie_word_embeddings=shape.tied,
    )


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert SHAPES[name].num_parameters == parameters


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(SHAPES[name]))
    assert SHAPES[name].num_parameters == sum(one.numel() for one in model.parameters())


def tiny(**other: Any) -> ModelShape:
    settings = {"vocab_size": 50, "width": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_width": 6}
    return ModelShape(name="tiny", ffn_width=40, **{**settings, **other})


def test_keys_and_values_of_a_token_are_those_that_transformers_keeps() -> None:
    shape = tiny()
    model = AutoModelForCausalLM.from_config(config_of(shape)).eval()
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.arange(7)[None], past_key_values=cache)
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.kv_floats * 7 == kept


def test_adapters_are_two_thin_matrices_for_each_matrix() -> None:
    shape = tiny(num_layers=1)
    model = AutoModelForCausalLM.from_config(config_of(shape))
    linear = [one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and "layers" in name]
    assert shape.adapter_parameters(3) == sum(3 * (one.in_features + one.out_features) for one in linear)


@pytest.mark.parametrize("model", ["8B", "8b", "Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B"])
def test_a_model_by_its_size_or_name(model: str) -> None:
    assert shape_of(model) == SHAPES["Qwen3-8B"]


def test_a_model_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(SHAPES["Qwen3-0.6B"]).to_dict()))
    assert shape_of(str(tmp_path)).num_parameters == PUBLISHED["Qwen3-0.6B"]


def test_the_embedded_model() -> None:
    assert shape_of("embedded").vocab_size == 1984


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "cannot be read"),
        ("[]", "must be a JSON object"),
        ('{"model_type": "hal9000"}', "hal9000"),
        ('{"model_type": "llama", "hidden_size": 0, "num_attention_heads": 4}', "positive integer 'hidden_size'"),
    ],
)
def test_a_folder_that_cannot_be_planned_with(config: str | None, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        shape_of(str(tmp_path))


def test_a_mixture_is_counted_as_it_is_computed(tmp_path: Path) -> None:
    shape = SHAPES["Qwen3-30B-A3B"]
    config_of(shape, layers=2).save_pretrained(tmp_path)
    found, wanted = shape_of(str(tmp_path)), replace(shape, num_layers=2)
    numbers = ("num_parameters", "layer_parameters", "head_parameters", "matrix_parameters", "kv_floats")
    numbers += ("layer_experts", "all_experts")
    assert [getattr(found, name) for name in numbers] == [getattr(wanted, name) for name in numbers]
    assert found.experts == shape.experts and found.refusal
    assert found.adapter_parameters(4) == wanted.adapter_parameters(4)


WIDTHS: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "pad_token_id": None,
}
MIXTURE = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
NARROW = {"moe_intermediate_size": 256, "first_k_dense_replace": 0}
LATENT = {"q_lora_rank": 192, "kv_lora_rank": 128, "head_dim": None, "n_group": 1, "topk_group": 1}


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("olmo2", {}),
        ("mixtral", MIXTURE),
        ("olmoe", MIXTURE),
        ("qwen3_moe", MIXTURE | NARROW),
        ("glm4_moe", MIXTURE | NARROW),
        ("deepseek_v3", MIXTURE | NARROW | LATENT),
    ],
)
def test_what_a_layer_keeps_is_near_what_torch_allocates(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    peaks = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        AutoConfig.for_model(family, **WIDTHS | settings, num_hidden_layers=layers).save_pretrained(folder)
        model = empty_policy(folder, dtype="bfloat16", backend="transformers")
        peaks.append(count_step(model, [512] * 4)["forward"].peak_bytes)
    shape = counted_shape(folder, "it is computed by transformers")
    assert layer_floats(shape, is_flash=True) == pytest.approx((peaks[1] - peaks[0]) / 2 / (512 * 4) / 2, rel=0.15)


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean '32B'"):
        shape_of("33B")
