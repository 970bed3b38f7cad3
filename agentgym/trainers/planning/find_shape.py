"""Finds the shape of the model that a user names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from agentgym.embedded import EMBEDDED_MODELS
from agentgym.errors import NOT_JSON, ConfigError, nearest
from agentgym.model.architectures import refusal
from agentgym.model.decoder_config import DecoderConfig
from agentgym.model.model_name import model_folder, names_model
from agentgym.trainers.planning.shapes import ModelShape
from agentgym.types import JSON

__all__ = ["PUBLISHED", "shape_of"]


def _config(family: str, layers: int, width: int, heads: int, ffn: int, **others: JSON) -> Mapping[str, JSON]:
    """Returns a config.json; without `others` it has eight heads of keys and values, and Qwen3's vocabulary."""
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
        **others,
    }


def _mixture(layers: int, width: int, heads: int, ffn: int) -> Mapping[str, JSON]:
    experts: Mapping[str, JSON] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": ffn}
    return _config("qwen3_moe", layers, width, heads, ffn, num_key_value_heads=4, **experts)


PUBLISHED = {
    "Qwen3-0.6B": _config("qwen3", 28, 1024, 16, 3072, tie_word_embeddings=True),
    "Qwen3-1.7B": _config("qwen3", 28, 2048, 16, 6144, tie_word_embeddings=True),
    "Qwen3-4B": _config("qwen3", 36, 2560, 32, 9728, tie_word_embeddings=True),
    "Qwen3-8B": _config("qwen3", 36, 4096, 32, 12_288),
    "Qwen3-14B": _config("qwen3", 40, 5120, 40, 17_408),
    "Qwen3-32B": _config("qwen3", 64, 5120, 64, 25_600),
    "Qwen3-30B-A3B": _mixture(48, 2048, 32, 768),
    "Qwen3-235B-A22B": _mixture(94, 4096, 64, 1536),
    "Qwen2.5-7B": _config("qwen2", 28, 3584, 28, 18_944, num_key_value_heads=4, vocab_size=152_064),
    "Qwen2.5-72B": _config("qwen2", 80, 8192, 64, 29_568, vocab_size=152_064),
    "Llama-3.1-8B": _config("llama", 32, 4096, 32, 14_336, vocab_size=128_256),
    "Llama-3.1-70B": _config("llama", 80, 8192, 64, 28_672, vocab_size=128_256),
}
"""The sizes in the config.json of known models, by their published names."""


def shape_of(model: str) -> ModelShape:
    """Returns the shape of a name in `PUBLISHED`, a size, `embedded`, or a folder with a config.json.

    A size is the first model of that size (`8B` is Qwen3-8B). Raises ConfigError for any other name.
    """
    short_name = model.rsplit("/", 1)[-1].lower()
    for name, config in PUBLISHED.items():
        if short_name in (name.lower(), _size_of(name).lower()):
            with TemporaryDirectory() as folder_name:
                folder = Path(folder_name, name)
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(config))
                return _of_folder(folder)
    folder = model_folder(model) if names_model(model) else Path(model)
    if folder.is_dir():
        return _of_folder(folder)
    sizes = [_size_of(name) for name in PUBLISHED]
    hint = nearest(model, [*PUBLISHED, *sizes, *EMBEDDED_MODELS]) or ""
    raise ConfigError(
        f"unknown model {model!r}{hint or '.'} A size ({', '.join(dict.fromkeys(sizes))}), a name such as Llama-3.1-8B,"
        " `embedded` or a folder with a config.json was wanted"
    )


def _size_of(name: str) -> str:
    """Returns the size in a name: `8B` of Qwen3-8B and of Llama-3.1-8B, `30B-A3B` of Qwen3-30B-A3B."""
    *_, size, active = name.split("-")
    return f"{size}-{active}" if active.startswith("A") else active


def _of_folder(folder: Path) -> ModelShape:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a model's configuration: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{str(path)!r} holds no configuration: it must be a JSON object")
    from agentgym.trainers.planning.counted_shape import counted_shape  # here: neither help nor a mistake needs torch

    reason = refusal(config)
    if reason is None:
        DecoderConfig.from_hf(config)  # its errors name the setting, those of transformers may not
    return counted_shape(folder, reason or "")
