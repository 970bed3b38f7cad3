"""Small random models of the architectures that transformers knows, with what is particular to each.

Sizes are those that a check computes in a second. Windows and chunks are shorter than the check's sequences, so that
they matter, and mixtures of experts have more experts than a token takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from agentgym.errors import ConfigError
from agentgym.model.architectures import quantization
from agentgym.model.model_class import auto_class, class_of_model, quiet_transformers
from agentgym.types import JSON

__all__ = ["ARCHITECTURES", "save_small_model", "shrink"]

_SHAPE: dict[str, JSON] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: dict[str, JSON] = {"head_dim": 32}
_SMALL_TABLE: dict[str, JSON] = {"vocab_size_per_layer_input": 300}
_WINDOW: dict[str, JSON] = {"sliding_window": 8}
_EXPERTS: dict[str, JSON] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL: dict[str, JSON] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, JSON] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LATENT: dict[str, JSON] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_LINEAR: dict[str, JSON] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_CHUNKS: dict[str, JSON] = {"num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 16}
_VISION: dict[str, JSON] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_TOWER: dict[str, JSON] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 64,
}
_SECTIONS: dict[str, JSON] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
        "partial_rotary_factor": 1.0,
    }
}
_SHARED: dict[str, JSON] = {"shared_expert_intermediate_size": 32}
_LLAMA3: dict[str, JSON] = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_YARN: dict[str, JSON] = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}

ARCHITECTURES: dict[str, dict[str, JSON]] = {
    "llama": {},
    "llama:llama3": _LLAMA3,
    "llama:yarn": _YARN,
    "mistral": _WINDOW,
    "ministral": _WINDOW | _HEADS,
    "ministral3": {},
    "mixtral": _LOCAL | {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": _EXPERTS | _SHARED,
    "qwen3": _HEADS,
    "qwen3_moe": _HEADS | _EXPERTS,
    "qwen3_next": _HEADS | _LINEAR | _EXPERTS | _SHARED,
    "qwen3_5_text": _HEADS | _LINEAR,
    "qwen3_5_moe_text": _HEADS | _LINEAR | _EXPERTS | _SHARED,
    "gemma": _HEADS,
    "gemma2": _HEADS | _WINDOW,
    "gemma3_text": _HEADS | _WINDOW,
    "gemma4_text": _HEADS | _WINDOW | _SMALL_TABLE,
    "vaultgemma": _HEADS | _WINDOW,
    "phi": {},
    "phi3": {},
    "phimoe": _LOCAL,
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": {},
    "granitemoe": _LOCAL,
    "granitemoeshared": _LOCAL | {"shared_intermediate_size": 32},
    "granitemoehybrid": _LOCAL
    | {"layer_types": ["mamba", "attention", "mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 32},
    "cohere": {},
    "cohere2": _WINDOW,
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": _HEADS | _ROUTED,
    "glm4_moe_lite": _LATENT | _ROUTED | {"q_lora_rank": 16},
    "gpt_oss": _HEADS | _LOCAL | _WINDOW,
    "seed_oss": _HEADS,
    "exaone4": _WINDOW,
    "smollm3": {},
    "apertus": {},
    "arcee": {},
    "helium": _HEADS,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS | {"num_experts": 4, "moe_topk": 2},
    "deepseek_v2": _LATENT | _ROUTED | {"q_lora_rank": None},
    "deepseek_v3": _LATENT | _ROUTED | {"q_lora_rank": 16},
    "kimi_k2": {},
    "longcat_flash": _LATENT
    | _ROUTED
    | {"q_lora_rank": 16, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2}
    | {"zero_expert_num": 2, "head_dim": 8},
    "dots1": _HEADS | _ROUTED,
    "minimax": {},
    "minimax_m2": _HEADS | _LOCAL,
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "nemotron": {},
    "nemotron_h": {},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 32},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "jamba": {},
    "starcoder2": {},
    "stablelm": {},
    "llama4_text": _HEADS | _LOCAL | _CHUNKS,
    "afmoe": _HEADS,
    "gpt2": {},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16},
    "falcon_mamba": {},
    "gemma3": {"text_config": _HEADS | _WINDOW, "vision_config": _VISION, "mm_tokens_per_image": 4},
    "gemma4": {"text_config": _HEADS | _WINDOW | _SMALL_TABLE, "vision_config": _VISION},
    "glm4v": {"text_config": _HEADS | _SECTIONS, "vision_config": _TOWER},
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": _VISION},
    "llama4": {
        "text_config": _HEADS | _LOCAL | _CHUNKS,
        "vision_config": _VISION | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16},
    },
    "qwen2_5_vl": {"text_config": _HEADS | _SECTIONS, "vision_config": _TOWER},
    "qwen3_vl": {"text_config": _HEADS | _SECTIONS, "vision_config": _TOWER | {"deepstack_visual_indexes": [0]}},
    "qwen3_5": {"text_config": _HEADS | _LINEAR, "vision_config": _TOWER},
}
"""Settings of config.json by `model_type`, with a variant after a colon."""

_SMALLER: Mapping[str, int] = {
    "vocab_size": 512,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "max_position_embeddings": 1024,
}
"""The largest values in a small model of a shape: what makes a model big, or is longer than the check's sequences."""
_LAYERS = 8
"""The number of layers of a small model, enough for the patterns of current hybrids."""


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model with the architecture, widths and heads of another one.

    Its weights are plain. Raises ConfigError if those of the other one are quantized and cannot be trained.
    """
    quantization(config)
    small = {name: value for name, value in config.items() if name != "quantization_config"}
    for key, max_value in _SMALLER.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], max_value)
    layers = min(int(small.get("num_hidden_layers", _LAYERS)), _LAYERS)
    small["num_hidden_layers"] = layers
    if isinstance(small.get("layer_types"), list):
        small["layer_types"] = small["layer_types"][:layers]
    for key in ("num_experts_per_tok", "moe_topk", "moe_k"):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], 4)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if key in small:
            small[key] = 0
    if isinstance(small.get("text_config"), dict):
        small["text_config"] = shrink(small["text_config"])
    return small


def _mapping(settings: JSON) -> dict[str, JSON]:
    assert isinstance(settings, Mapping)
    return dict(settings)


def save_small_model(config: str | Mapping[str, Any], folder: Path, code_path: str | None = None) -> None:
    """Saves a random model, of an architecture by its name or of a config.json, into a folder.

    The model of a config.json may be of the user's class at `code_path`, `path/to/file.py:Class`.

    Raises ConfigError if transformers has no such model.
    """
    from transformers import AutoConfig

    torch.manual_seed(0)
    try:
        if isinstance(config, str):
            own = ARCHITECTURES[config]
            shape = (
                own | {"text_config": _SHAPE | _mapping(own["text_config"])} if "text_config" in own else _SHAPE | own
            )
            settings = AutoConfig.for_model(config.partition(":")[0], **shape)
            model_class = auto_class(settings)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
            settings, model_class = class_of_model(folder, code_path)
        make = model_class.from_config if code_path is None else model_class._from_config
        model = make(settings, attn_implementation="eager").float()
    except Exception as error:  # the boundary: each architecture refuses settings in its own way
        reason = str(error).strip().partition("\n")[0][:100]
        raise ConfigError(f"transformers cannot make a small model: {type(error).__name__}: {reason}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, min(0.12, 1.0 / parameter.shape[-1] ** 0.5))
    with quiet_transformers():
        model.save_pretrained(folder)
