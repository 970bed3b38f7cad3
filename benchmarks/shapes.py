"""The shapes of the models that benchmarks draw at random, Qwen3's and smaller, and the backends of a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import save_model_folder
from agentgym.model.policy import is_fast

__all__ = ["PUBLISHED", "SHAPES", "Shape", "backends_of", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    width: int
    num_layers: int
    num_heads: int
    ffn_width: int
    vocab_size: int
    context_window: int = 1024
    head_width: int | None = None
    """The width of a head; None divides the width by their number."""

    def save(self, folder: Path) -> int:
        """Saves a random model and returns the number of its parameters."""
        config = DecoderConfig(
            family="qwen3",
            vocab_size=self.vocab_size,
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads // 2,
            head_width=self.head_width or self.width // self.num_heads,
            ffn_width=self.ffn_width,
            context_window=self.context_window,
            qk_norm=True,
        )
        model = Decoder(config).initialize(0)
        save_model_folder(model, folder)
        return sum(parameter.numel() for parameter in model.parameters())


SHAPES = {
    "1M": Shape(128, 4, 4, 384, 1984),
    "60M": Shape(512, 14, 8, 1536, 32_000),
    "500M": Shape(1024, 28, 16, 3072, 32_000, head_width=128),  # Qwen3-0.6B with a smaller vocabulary
}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-1b": (
        "gemma3_text",
        {
            "vocab_size": 262_144,
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 6912,
            "sliding_window": 512,
            "max_position_embeddings": 32_768,
        },
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40_960,
        },
    ),
}
"""The kind and sizes of models by transformers' names of them; sizes that are left out are its own."""

_SIZES = {  # width, layers, query heads, feed-forward, tied
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "32B": (5120, 64, 64, 25600, False),
}


def backends_of(folder: Path) -> tuple[Literal["fast", "transformers"], ...]:
    """Returns the backends that compute the model of a folder; `transformers` computes every one."""
    return ("fast", "transformers") if is_fast(folder, "auto") else ("transformers",)


def shape_of(name: str) -> DecoderConfig:
    """Returns the shape of a published Qwen3, or `tiny`."""
    if name == "tiny":
        sizes = {"vocab_size": 4096, "head_width": 16, "context_window": 4096, "num_kv_heads": 2}
        numbers = 64, 2, 4, 128, True
    else:
        sizes = {"vocab_size": 151_936, "head_width": 128, "context_window": 40_960, "num_kv_heads": 8}
        numbers = _SIZES[name]
    width, num_layers, num_heads, ffn_width, tied = numbers
    sizes |= {"width": width, "num_layers": num_layers, "num_heads": num_heads, "ffn_width": ffn_width}
    return DecoderConfig(family="qwen3", rope_theta=1e6, qk_norm=True, tied=tied, **sizes)
