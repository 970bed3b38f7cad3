"""The graph of the fast decoder's step, and what all compiled steps are given.

The traced functions hold only sizes. All tensors are arguments, so that weights stay live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.engines.local.kernels.row_products import row_linear
from agentgym.engines.local.kernels.slot_attention import SlotRows, attend_slots
from agentgym.model.decoder import Decoder, DecoderConfig

__all__ = ["StepGraph", "StepInputs", "decoder_graph"]

# Shape suffixes: N rows, R rows whose logits are wanted, H query heads, K key/value heads, D head width, E model width,
# V vocabulary, W window.


class StepInputs(NamedTuple):
    """The rows of a step, by their tokens, slots, positions and common keys, and the wanted ones."""

    ids_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    root_N: Tensor
    common_N: Tensor
    wanted_R: Tensor

    def slot_rows(self, first_N: Tensor | None = None) -> SlotRows:
        """Returns what attention reads; `first_N` are the first keys that the rows see, by default all of them."""
        return SlotRows(self.slot_N, self.position_N, first_N, self.root_N, self.common_N)


@dataclass(frozen=True)
class StepGraph:
    """A function to compile, which returns logits `[R, V]`, and the weights that it is given."""

    step: Callable[[StepInputs, tuple[Tensor, ...], Any], Tensor]
    """Takes the rows, the keys and values of all layers, and the weights."""
    weights: Any


class _LayerWeights(NamedTuple):
    """The tensors of a `DecoderLayer`, under its names."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


class _Weights(NamedTuple):
    embed: Tensor
    layers: tuple[_LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    rope: tuple[Tensor, Tensor]


def decoder_graph(model: Decoder, window: int) -> StepGraph:
    """Returns the graph of the fast decoder, for slots of `window` tokens."""
    layers = tuple(_LayerWeights(*(getattr(layer, name) for name in _LayerWeights._fields)) for layer in model.layers)
    width = model.config.head_width // 2
    cos_WD, sin_WD = model.cos_TD[:window, :width], model.sin_TD[:window, width:]
    rope = cos_WD.contiguous(), sin_WD.contiguous()
    weights = _Weights(model.embed, layers, model.final_norm, model.head_weight, rope)
    return StepGraph(_DecoderStep(model.config).step, weights)


class _DecoderStep:
    """The traced function of the fast decoder."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def step(self, due: StepInputs, kvs: tuple[Tensor, ...], weights: _Weights) -> Tensor:
        """Computes logits `[R, V]`."""
        cos_N1D, sin_N1D = (table_WD[due.position_N][:, None] for table_WD in weights.rope)
        x_NE = F.embedding(due.ids_N, weights.embed)
        for layer, kv in zip(weights.layers, kvs, strict=True):
            q_NHD, k_NKD, v_NKD = self._heads(layer, x_NE)
            q_NHD = _rotate(q_NHD * self.config.head_width**-0.5, cos_N1D, sin_N1D)
            k_NKD = _rotate(k_NKD, cos_N1D, sin_N1D)
            attended_NHD = attend_slots((q_NHD, k_NKD, v_NKD), kv, due.slot_rows())
            x_NE = x_NE + row_linear(attended_NHD.flatten(1), layer.out)
            gate_NF, up_NF = row_linear(self._norm(x_NE, layer.ffn_norm), layer.gate_up).chunk(2, -1)
            x_NE = x_NE + row_linear(F.silu(gate_NF) * up_NF, layer.down)
        return row_linear(self._norm(x_NE[due.wanted_R], weights.final_norm), weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps) * weight

    def _heads(self, layer: _LayerWeights, x_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        flat = row_linear(self._norm(x_NE, layer.input_norm), layer.qkv)
        if layer.qkv_bias is not None:
            flat = flat + layer.qkv_bias
        counts = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        q_NHD, k_NKD, v_NKD = flat.view(-1, sum(counts), c.head_width).split(counts, 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_NHD, k_NKD = self._norm(q_NHD, layer.q_norm), self._norm(k_NKD, layer.k_norm)
        return q_NHD, k_NKD, v_NKD


def _rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    a, b = x_NHD.chunk(2, -1)
    return torch.cat((a * cos_N1D - b * sin_N1D, b * cos_N1D + a * sin_N1D), -1)
