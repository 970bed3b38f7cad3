"""The model architectures that the fast decoder computes, and why it refuses other configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from agentgym.model.architecture_keys import unknown_key
from agentgym.model.rope import rope_refusal
from agentgym.types import JSON

__all__ = ["ARCHITECTURES", "SUPPORTED", "ModelBackend", "quantization", "refusal"]

ModelBackend = Literal["auto", "fast", "transformers"]
"""The code that computes a model: the fast decoder, transformers, or the first of them that can."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The `model_type` of a `config.json`, mapped to the class in transformers."""
SUPPORTED = "Llama, Mistral, Qwen2 and Qwen3 (dense, with full attention)"
"""The supported models, as error messages name them."""


def refusal(config: Mapping[str, JSON]) -> str | None:
    """Returns why the fast decoder does not compute a model with this `config.json`, or None if it does.

    Every key that changes what the four architectures compute is either read by `DecoderConfig` or refused here.
    Unknown keys are refused too.

    >>> refusal({"model_type": "llama", "hidden_act": "relu"})
    "hidden_act 'relu' is not supported, only 'silu' is"
    """
    family = str(config.get("model_type"))
    if family not in ARCHITECTURES:
        return f"model_type {family!r} is not supported, only {', '.join(ARCHITECTURES)} are"
    classes = config.get("architectures") or [ARCHITECTURES[family]]
    if isinstance(classes, list) and ARCHITECTURES[family] not in classes:
        return f"architectures {classes!r} is not supported, only {ARCHITECTURES[family]!r} is"
    return rope_refusal(config) or _attention_refusal(family, config) or _layer_refusal(config) or unknown_key(config)


def _attention_refusal(family: str, config: Mapping[str, JSON]) -> str | None:
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        return f"layer_types {layer_types!r:.200} is not supported, only a list of 'full_attention' is"
    if config.get("sliding_window") and config.get("use_sliding_window", family == "mistral"):
        return f"sliding-window attention (sliding_window {config['sliding_window']}) is not supported"
    biases = [key for key in ("attention_bias", "mlp_bias") if config.get(key)]
    return f"{' and '.join(biases)} is not supported" if biases else None


def _layer_refusal(config: Mapping[str, JSON]) -> str | None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"hidden_act {config['hidden_act']!r} is not supported, only 'silu' is"
    return quantization(config)


def quantization(config: Mapping[str, JSON]) -> str | None:
    """Returns why a model with quantized weights is refused, or None if its `config.json` names none."""
    quantized = config.get("quantization_config")
    if not quantized:
        return None
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
    return f"quantized weights ({method}) are not supported: give a model in bfloat16 or float32"
