"""The states of recurrent layers between the passes of a transformers model, such as those of linear attention.

A `PassCache` goes with one pass. Keys and values are kept by the attention of the pass (`pass_attention`), so the
cache holds only states, one row for each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["PassCache", "StateName", "keeps_state"]

# Shape suffixes: B sequences of a pass.


STATELESS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"})
"""The kinds of layers, by `layer_types` of a config.json, that keep nothing but keys and values."""


@dataclass(frozen=True, order=True)
class StateName:
    """The place of a state in a model."""

    layer: int
    kind: str
    """`conv` or `recurrent`."""
    index: int
    """The index among the states of this kind in the layer."""


class PassCache:
    """The cache that a model of transformers reads and changes in one pass."""

    def __init__(self, hf: Any, states: Mapping[StateName, Tensor] | None = None) -> None:
        from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

        self.cache = DynamicCache(config=hf.config)
        if not any(isinstance(layer, CacheLayerMixin) for layer in self.cache.layers):
            self.cache.get_seq_length = lambda *_, **__: 0
            self.cache.get_mask_sizes = lambda length, *_, **__: (length, 0)
        self._recurrent = {}
        for number, layer in enumerate(self.cache.layers):
            if isinstance(layer, CacheLayerMixin):
                layer.update = _keep_nothing
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                self._recurrent[number] = layer
        for name, state_B in (states or {}).items():
            self._put(name, state_B)

    def _put(self, name: StateName, state_B: Tensor) -> None:
        layer = self._recurrent[name.layer]
        layer.dtype, layer.device = state_B.dtype, state_B.device
        getattr(layer, f"{name.kind}_states")[name.index] = state_B
        getattr(layer, f"is_{name.kind}_states_initialized")[name.index] = True
        layer.has_previous_state[name.index] = True
        if name.kind == "conv":
            layer.conv_kernel_size[name.index] = state_B.shape[-1]

    def states(self) -> dict[StateName, Tensor]:
        """Returns the states after the pass, `[B, ...]` each."""
        return {
            StateName(number, kind, index): state_B
            for number, layer in self._recurrent.items()
            for kind in ("conv", "recurrent")
            for index, state_B in getattr(layer, f"{kind}_states").items()
            if state_B is not None
        }


def _keep_nothing(keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return keys, values


def keeps_state(hf: Any, text: Any) -> bool:
    """Returns whether a model has recurrent layers; `text` is the configuration of its language part."""
    kinds = getattr(text, "layer_types", None) or ()
    return bool(getattr(hf, "_is_stateful", False)) or not STATELESS.issuperset(map(str, kinds))
