"""The keys of a `config.json`: those that are read, those without effect, and a check for unknown ones."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.types import JSON

__all__ = ["unknown_key"]

READ = frozenset(
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
    for key in sorted(config.keys() - READ - WITHOUT_EFFECT):
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
