"""The model architectures that the fast decoder computes, and why it refuses other configurations."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.loading import is_code_path
from agentgym.model.rope import rope_refusal
from agentgym.types import JSON

__all__ = ["ARCHITECTURES", "SUPPORTED", "check_backend", "dequantization", "quantization", "refusal", "unknown_key"]

BACKENDS = ("auto", "fast", "transformers")
"""The code that computes a model: the first of the others that can, the fast decoder, transformers."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The `model_type` of a `config.json`, mapped to the class in transformers."""
DEQUANTIZED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""The methods of quantized weights that are turned into plain ones, mapped to their settings in transformers."""
SUPPORTED = "Llama, Mistral, Qwen2 and Qwen3 (dense, with full attention)"
"""The supported models, as error messages name them."""


def check_backend(name: str, engine: str = "local") -> None:
    """Raises UnknownName unless `name` is of BACKENDS or the place of a class, ConfigError for an engine without it."""
    if name not in BACKENDS and not is_code_path(name):
        near = nearest(name, BACKENDS) or "."
        raise UnknownName(
            f"unknown model_backend {name!r}{near} Known: {', '.join(BACKENDS)}, or a class, path/to/file.py:Class"
        )
    if is_code_path(name) and engine != "local" and not is_code_path(engine):
        raise ConfigError(f"{engine} has no class {name!r}, and would compute another model: sample with engine local")


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
    method = quantization(config)
    return None if method is None else f"quantized weights ({method})"


def quantization(config: Mapping[str, JSON]) -> str | None:
    """Returns the method by which a model's weights are quantized, or None if its `config.json` names none.

    Raises ConfigError for one that transformers does not turn into plain weights on every machine.
    """
    quantized = config.get("quantization_config")
    if not quantized:
        return None
    method = str(quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized)
    if method not in DEQUANTIZED:
        methods = " and ".join(DEQUANTIZED)
        raise ConfigError(
            f"quantized weights ({method}) are not supported, only {methods} are: give a model in bfloat16 or float32"
        )
    return method


def dequantization(config: Mapping[str, JSON]) -> dict[str, object]:
    """Returns the options with which transformers loads a model's weights as plain ones; none for those that are."""
    import transformers

    method = quantization(config)
    return (
        {} if method is None else {"quantization_config": getattr(transformers, DEQUANTIZED[method])(dequantize=True)}
    )


CONFIG_KEYS = frozenset(
    {
        "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
        "rms_norm_eps", "tie_word_embeddings", "sliding_window", "use_sliding_window", "attention_bias", "mlp_bias",
        "hidden_act", "layer_types",
        "quantization_config", "architectures", "partial_rotary_factor",
    }
)  # fmt: skip
"""The keys that `DecoderConfig.from_hf` reads or `refusal` checks."""
WITHOUT_EFFECT = frozenset(
    {
        # the author, the dtype and the program
        "transformers_version", "torch_dtype", "dtype", "auto_map", "is_llama_config",
        "unsloth_version", "unsloth_fixed", "transformers.js_config", "finetuning_task", "task_specific_params",
        # the tokenizer's ids and how text is generated, which the renderer and the rollout decide
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
        "bos_token", "eos_token", "pad_token", "use_cache", "temperature", "top_p", "top_k", "do_sample", "max_length",
        "max_new_tokens", "repetition_penalty", "tokenizer_class", "prefix",
        # training of the first checkpoint; dropout is 0 in reinforcement learning
        "initializer_range", "attention_dropout", "hidden_dropout", "max_window_layers",
        # classification heads and the form of outputs
        "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions",
        "chunk_size_feed_forward", "is_decoder",
    }
)  # fmt: skip
NEUTRAL: Mapping[str, JSON] = {"pretraining_tp": 1, "is_causal": True}
"""The keys that have no effect if they have this value."""


def unknown_key(config: Mapping[str, JSON]) -> str | None:
    """Returns why a key could change what the model computes, or None if no key could.

    An unknown key passes only if it is switched off: null, false or empty. Keys with a leading underscore are notes of
    the program that wrote the file.

    >>> unknown_key({"residual_multiplier": 0.22})
    'residual_multiplier = 0.22 is not known, so it could change the model (take it out of config.json if it does not)'
    """
    for key in sorted(config.keys() - CONFIG_KEYS - WITHOUT_EFFECT):
        value = config[key]
        if value is None or key.startswith("_"):
            continue
        if key in NEUTRAL and value != NEUTRAL[key]:
            return f"{key} = {value!r:.80} is not supported, only {NEUTRAL[key]!r} is"
        if key in NEUTRAL or value is False or value in ([], {}, ""):
            continue
        return (
            f"{key} = {value!r:.80} is not known, so it could change the model (take it out of config.json if it does"
            " not)"
        )
    return None
