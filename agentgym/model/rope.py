"""Rotary position embeddings: the scalings that are supported, and the frequencies of a configuration.

Scaled frequencies are those of `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from agentgym.types import JSON

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RopeScaling", "rope_frequencies", "rope_of", "rope_refusal", "rope_scaling", "short_rope_length"]

RopeScaling: TypeAlias = "tuple[tuple[str, JSON], ...]"
"""The items of a `rope_scaling` in config.json, sorted by key; empty for plain rotary embeddings."""

REQUIRED: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
"""The keys that each kind of rotary embeddings needs. Their values are positive numbers."""
OPTIONAL: Mapping[str, frozenset[str]] = {
    "yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}
"""The keys that a kind may have besides."""
COMMON = frozenset({"rope_type", "type", "rope_theta"})


def rope_of(config: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Returns the parameters of the rotary embeddings; empty if the configuration has none except `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {"rope_type": str(rope)}


def rope_refusal(config: Mapping[str, JSON]) -> str | None:
    """Returns why the rotary embeddings of a `config.json` cannot be computed, or None if they can.

    >>> rope_refusal({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    "rope scaling 'dynamic' is not supported, only linear, llama3, yarn are"
    """
    rope = rope_of(config)
    kind = _kind(rope)
    if kind not in REQUIRED:
        return f"rope scaling {kind!r} is not supported, only {', '.join(sorted(REQUIRED.keys() - {'default'}))} are"
    factors = {"partial_rotary_factor": config.get("partial_rotary_factor"), **rope}
    names = COMMON | REQUIRED[kind] | OPTIONAL.get(kind, frozenset())
    if odd := sorted(key for key in factors.keys() - names if factors[key] not in (None, 1, 1.0)):
        return f"rotary embeddings with {', '.join(odd)} are not supported"
    if wrong := sorted(key for key in REQUIRED[kind] if not _is_positive(rope.get(key))):
        return f"rope scaling {kind!r} needs a positive number {wrong[0]!r}, got {rope.get(wrong[0])!r:.80}"
    return None


def short_rope_length(config: Mapping[str, JSON]) -> int | None:
    """Returns the longest sequence with the rotary embeddings of short ones (longrope); None if all have the same ones.

    >>> short_rope_length({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096})
    4096
    """
    rope, key = rope_of(config), "original_max_position_embeddings"
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]  # one for each kind of layer
    lengths = [kind.get(key, config.get(key)) for kind in kinds if _kind(kind) in ("longrope", "su")]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def _kind(rope: Mapping[str, JSON]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _is_positive(value: JSON) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def rope_scaling(rope: Mapping[str, JSON]) -> RopeScaling:
    """Returns the scaling of the parameters that `rope_of` returns."""
    kind = _kind(rope)
    keys = () if kind == "default" else sorted(REQUIRED[kind] | OPTIONAL.get(kind, frozenset()))
    items = tuple((key, rope[key]) for key in keys if rope.get(key) is not None)
    return (*items, ("rope_type", kind)) if items else ()


def rope_frequencies(
    head_width: int, theta: float, scaling: RopeScaling, *, context_window: int
) -> tuple[Tensor, float]:
    """Returns the angle per position of each pair of a head's entries, float64 `[D/2]`, and a factor of cos and sin."""
    import torch  # here, because settings are read without torch

    if not scaling:
        return theta ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_width,
        num_attention_heads=1,
        head_dim=head_width,
        max_position_embeddings=context_window,
        rope_parameters={**dict(scaling), "rope_theta": theta},
    )
    frequency_D, factor = ROPE_INIT_FUNCTIONS[str(dict(scaling)["rope_type"])](config)
    return frequency_D.double(), float(factor)
