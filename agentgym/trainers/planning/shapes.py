"""Shapes of decoders: their parameters, and their keys and values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, nearest
from agentgym.model.architectures import ARCHITECTURES, refusal
from agentgym.model.model_name import is_model_id, model_folder
from agentgym.trainers.settings.lora import PROJECTIONS
from agentgym.types import JSON

__all__ = ["SHAPES", "ModelShape", "shape_of"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of the Llama, Mistral, Qwen2 and Qwen3 families, as published.

    Example: `SHAPES["Qwen3-8B"].num_parameters` is 8,190,735,360, and a token's keys and values are 73,728 numbers.
    """

    name: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    tied: bool = False
    """True if the head is the embedding."""
    qk_norm: bool = False
    qkv_bias: bool = False
    refusal: str = ""
    """The reason that the fast decoder does not compute the model; empty if it does."""

    @property
    def q_width(self) -> int:
        """The width of all heads' queries of a token in a layer."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """The width of all heads' keys of a token in a layer, or of their values."""
        return self.num_kv_heads * self.head_width

    @property
    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """The input and output widths of a layer's matrices, by their published names."""
        e, q, kv, f = self.width, self.q_width, self.kv_width, self.ffn_width
        return dict(zip(PROJECTIONS, ((e, q), (e, kv), (e, kv), (q, e), (e, f), (e, f), (f, e)), strict=True))

    @property
    def layer_parameters(self) -> int:
        """The number of weights of a layer, norms and biases included."""
        matrices = sum(inputs * outputs for inputs, outputs in self.matrices.values())
        norms = 2 * self.width + (2 * self.head_width if self.qk_norm else 0)
        return matrices + norms + (self.q_width + 2 * self.kv_width if self.qkv_bias else 0)

    @property
    def head_parameters(self) -> int:
        """The number of weights outside of the layers: embedding, head, last norm."""
        return self.vocab_size * self.width * (1 if self.tied else 2) + self.width

    @property
    def num_parameters(self) -> int:
        """The number of all weights."""
        return self.num_layers * self.layer_parameters + self.head_parameters

    @property
    def kv_floats(self) -> int:
        """The number of values that a token has in the KV cache."""
        return 2 * self.num_layers * self.kv_width

    def adapter_parameters(self, rank: int, modules: Sequence[str] = PROJECTIONS) -> int:
        """Returns the number of weights of LoRA adapters on `modules` of all layers."""
        return self.num_layers * rank * sum(sum(self.matrices.get(name, ())) for name in modules)


def _qwen3(name: str, layers: int, width: int, heads: int, ffn: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name,
        vocab_size=151_936,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_width=128,
        ffn_width=ffn,
        tied=tied,
        qk_norm=True,
    )


def _grouped_query_shape(name: str, layers: int, width: int, ffn: int, vocab: int) -> ModelShape:
    """Returns a shape of Llama 3.1, or of Qwen2.5 without its biases: eight heads of keys and values, of width 128."""
    return ModelShape(
        name=name,
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        num_heads=width // 128,
        num_kv_heads=8,
        head_width=128,
        ffn_width=ffn,
    )


def _known_shapes() -> dict[str, ModelShape]:
    shapes = [
        _qwen3("Qwen3-0.6B", 28, 1024, 16, 3072, tied=True),
        _qwen3("Qwen3-1.7B", 28, 2048, 16, 6144, tied=True),
        _qwen3("Qwen3-4B", 36, 2560, 32, 9728, tied=True),
        _qwen3("Qwen3-8B", 36, 4096, 32, 12_288),
        _qwen3("Qwen3-14B", 40, 5120, 40, 17_408),
        _qwen3("Qwen3-32B", 64, 5120, 64, 25_600),
        replace(_grouped_query_shape("Qwen2.5-7B", 28, 3584, 18_944, 152_064), num_kv_heads=4, qkv_bias=True),
        replace(_grouped_query_shape("Qwen2.5-72B", 80, 8192, 29_568, 152_064), qkv_bias=True),
        _grouped_query_shape("Llama-3.1-8B", 32, 4096, 14_336, 128_256),
        _grouped_query_shape("Llama-3.1-70B", 80, 8192, 28_672, 128_256),
    ]
    return {shape.name: shape for shape in shapes}


SHAPES = _known_shapes()
"""The known shapes, by their published names."""


def shape_of(model: str) -> ModelShape:
    """Returns the shape of a name in `SHAPES`, a size, `embedded`, or a folder with a config.json.

    A size is the first shape of that size (`8B` is Qwen3-8B). Raises ConfigError for any other name.
    """
    wanted = model.rsplit("/", 1)[-1].lower()
    for name, shape in SHAPES.items():
        if wanted in (name.lower(), name.lower().rpartition("-")[2]):
            return shape
    folder = embedded_folder() if model == "embedded" else Path(model)
    if is_model_id(model):
        folder = model_folder(model)
    if folder.is_dir():
        return _of_folder(folder)
    sizes = [name.rpartition("-")[2] for name in SHAPES]
    hint = nearest(model, [*SHAPES, *sizes, "embedded"]) or ""
    raise ConfigError(
        f"unknown model {model!r}{hint or '.'} A size ({', '.join(dict.fromkeys(sizes))}), a name such as Llama-3.1-8B,"
        " `embedded` or a folder with a config.json was wanted"
    )


def _of_folder(folder: Path) -> ModelShape:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a model's configuration: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{str(path)!r} holds no configuration: it must be a JSON object")
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"{str(path)!r} is of model_type {family!r}, and only {', '.join(ARCHITECTURES)} can be planned: give the"
            " size of the nearest one, such as --model 32B"
        )
    return _of_config(folder.name, str(family), config)


def _of_config(name: str, family: str, config: Mapping[str, JSON]) -> ModelShape:
    def integer(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json of {name!r} needs a positive integer {key!r}, got {value!r}")
        return value

    width, heads = integer("hidden_size"), integer("num_attention_heads")
    return ModelShape(
        name=name,
        vocab_size=integer("vocab_size"),
        width=width,
        num_layers=integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=integer("num_key_value_heads", heads),
        head_width=integer("head_dim", width // heads),
        ffn_width=integer("intermediate_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        refusal=refusal(config) or "",
    )
