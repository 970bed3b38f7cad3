"""The shape of a decoder, as a model folder's `config.json` gives it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.architectures import ARCHITECTURES, SUPPORTED, refusal
from agentgym.model.rope import RopeScaling, rope_of, rope_scaling, short_rope_length
from agentgym.types import JSON

__all__ = ["GATE_UP", "QKV", "DecoderConfig", "declared_window", "folder_config", "folder_window"]

QKV = ("q_proj", "k_proj", "v_proj")
"""The published projections that share one matrix of the decoder, in this order along its outputs."""
GATE_UP = ("gate_proj", "up_proj")
"""The published projections of the feed-forward that share one matrix, in this order along its outputs."""
DEFAULT_WINDOW = 2048
"""The window of a model whose configuration does not declare one; the default of Llama in `transformers`."""
MAX_WINDOW = 1 << 24
MAX_LAYERS = 10_000
"""The most that a config.json may ask memory for where no stored tensor shows that it is meant."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, read from a model folder's `config.json`."""

    family: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    context_window: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = ()
    norm_eps: float = 1e-6
    tied: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")

    @classmethod
    def from_hf(cls, config: Mapping[str, JSON]) -> DecoderConfig:
        """Reads Hugging Face's configuration keys; refuses what this decoder would compute differently."""
        reason = refusal(config)
        if reason is not None:
            raise ConfigError(
                f"the fast decoder does not compute this model: {reason}. It computes {SUPPORTED};"
                " transformers computes others, in one process (--model-backend auto)"
            )
        rope = rope_of(config)
        family = str(config["model_type"])
        return cls._from_known(family, config, rope)

    @classmethod
    def _from_known(cls, family: str, config: Mapping[str, JSON], rope: Mapping[str, JSON]) -> DecoderConfig:
        def integer(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config.json needs a positive integer {key!r}, got {value!r}")
            return value

        num_heads, width = integer("num_attention_heads"), integer("hidden_size")
        theta = config.get("rope_theta") or rope.get("rope_theta") or 10_000.0
        return cls(
            family=family,
            vocab_size=integer("vocab_size"),
            width=width,
            num_layers=integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=integer("num_key_value_heads", num_heads),
            head_width=integer("head_dim", width // num_heads),
            ffn_width=integer("intermediate_size"),
            context_window=declared_window(config),
            rope_theta=float(cast(float, theta)),
            rope_scaling=rope_scaling(rope),
            norm_eps=float(cast(float, config.get("rms_norm_eps", 1e-6))),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2",
        )

    def to_hf(self) -> dict[str, JSON]:
        """Returns the `config.json` that `transformers` reads."""
        scaling: dict[str, JSON] = {"rope_scaling": dict(self.rope_scaling)} if self.rope_scaling else {}
        return scaling | {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_width,
            "intermediate_size": self.ffn_width,
            "max_position_embeddings": self.context_window,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "torch_dtype": "float32",
        }


def declared_window(config: Mapping[str, JSON]) -> int:
    """Returns `max_position_embeddings` of a `config.json`, or the length at which longrope changes all positions.

    A longer row would be learned with other rotary embeddings than its first tokens were sampled with. Raises
    ConfigError unless it is a positive integer.
    """
    value = config.get("max_position_embeddings")
    if value is None:
        return DEFAULT_WINDOW
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json needs a positive integer 'max_position_embeddings', got {value!r}")
    if value > MAX_WINDOW:
        raise ConfigError(f"config.json has max_position_embeddings {value:,}; at most {MAX_WINDOW:,} are computed")
    return min(value, short_rope_length(config) or value)


def folder_window(folder: str | os.PathLike[str]) -> int:
    """Returns the window of the model in a folder; raises RunFolderError if it has no readable config.json."""
    return declared_window(folder_config(folder))


def folder_config(folder: str | os.PathLike[str]) -> dict[str, JSON]:
    """Returns the settings of a folder's config.json; raises RunFolderError if there are none that can be computed."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise RunFolderError(
            f"no model in {str(folder)!r}: it needs a config.json and safetensors; give a model folder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise RunFolderError(f"{str(path)!r} holds no settings")
    for part in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
        for key, value in part.items():
            if "layer" in key and isinstance(value, int) and value > MAX_LAYERS:
                raise RunFolderError(f"{str(path)!r} has {key} {value:,}; at most {MAX_LAYERS:,} layers are computed")
    return config
