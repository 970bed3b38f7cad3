"""Shapes against transformers' own models."""

from __future__ import annotations

import json
from collections import Counter
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
from agentgym.trainers.planning.find_shape import PUBLISHED, shape_of
from agentgym.trainers.planning.shapes import Experts, ModelShape

PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen2.5-7B": 7_615_616_512,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert shape_of(name).num_parameters == parameters


TINY = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 40,
}


def tiny(folder: Path, family: str = "llama", **others: Any) -> tuple[Any, ModelShape]:
    """Returns a model of transformers, and its shape."""
    config = AutoConfig.for_model(family, **{**TINY, "num_hidden_layers": 3, **others})
    config.save_pretrained(folder)
    return AutoModelForCausalLM.from_config(config).eval(), shape_of(str(folder))


def test_keys_and_values_of_a_token_are_those_that_transformers_keeps(tmp_path: Path) -> None:
    model, shape = tiny(tmp_path)
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.arange(7)[None], past_key_values=cache)
    stored = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.kv_floats * 7 == stored


def test_adapters_are_two_thin_matrices_for_each_matrix(tmp_path: Path) -> None:
    model, shape = tiny(tmp_path)
    sizes: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            sizes[name.rpartition(".")[2]] += 3 * (module.in_features + module.out_features)
    assert shape.adapter_parameters(3) == sizes.total()
    assert shape.adapter_parameters(3, ("q_proj", "down_proj")) == sizes["q_proj"] + sizes["down_proj"]


@pytest.mark.parametrize("model", ["8B", "8b", "Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B"])
def test_a_model_by_its_size_or_name(model: str) -> None:
    assert shape_of(model).name == "Qwen3-8B"


def test_a_model_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"]))
    assert shape_of(str(tmp_path)).num_parameters == PARAMETERS["Qwen3-0.6B"]


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
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["Qwen3-30B-A3B"], "num_hidden_layers": 2}))
    shape = shape_of(str(tmp_path))
    experts, attention, router = 3 * 128 * 768 * 2048, 2048 * (2 * 32 + 2 * 4) * 128, 128 * 2048
    assert (shape.layer_experts, shape.all_experts) == (experts, 2 * experts)
    assert shape.matrix_parameters == 2 * (experts + attention + router)
    assert shape.layer_parameters == experts + attention + router + 2 * 2048 + 2 * 128
    assert shape.head_parameters == 2 * 151_936 * 2048 + 2048
    assert shape.kv_floats == 2 * 2 * 4 * 128
    assert shape.experts == Experts(number=128, chosen=8, width=768) and shape.refusal
    assert shape.adapter_parameters(1) == 2 * (3 * 128 * (768 + 2048) + 2 * (2048 + 32 * 128) + 2 * (2048 + 4 * 128))


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
