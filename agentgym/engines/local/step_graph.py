"""The compiled step of the fast decoder, and the attention that all compiled steps have.

The traced functions hold only sizes. All tensors are arguments, so that weights stay live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.linear import row_linear

__all__ = ["StepGraph", "StepInputs", "attend_slots", "decoder_graph", "write_slots"]

# Shape suffixes: N rows, R rows whose logits are wanted, H query heads, K key/value heads, G query heads per key/value
# head, D head width, L padded keys, E model width, V vocabulary, W window.


class StepInputs(NamedTuple):
    """The rows of a step, by their tokens, slots and positions, the wanted ones, and 0 to the number of keys - 1."""

    ids_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    wanted_R: Tensor
    key_L: Tensor


@dataclass(frozen=True)
class StepGraph:
    """A function to compile, which returns logits `[R, V]`, and the weights that it is given."""

    step: Callable[[StepInputs, tuple[Tensor, ...], Any], Tensor]
    """Takes the rows, the keys and values of all layers, and the weights."""
    weights: Any


def write_slots(kv: Tensor, k_NKD: Tensor, v_NKD: Tensor, due: StepInputs) -> None:
    """Stores keys and values of the rows in a layer's `[2, S, K, W, D]`, in its first columns if it has more.

    They are written by an index, for a compiled write into a part of a tensor copies the whole.
    """
    num_heads, width = kv.shape[2], kv.shape[4]
    slot_N1, position_N1 = due.slot_N[:, None], due.position_N[:, None]
    if k_NKD.shape[2] == v_NKD.shape[2] == width:
        index_J = torch.arange(2 * num_heads)
        index = (index_J // num_heads)[None], slot_N1, (index_J % num_heads)[None], position_N1
        kv.index_put_(index, torch.cat((k_NKD, v_NKD), 1))
        return
    head_K1 = torch.arange(num_heads)[:, None]
    for part, new_NKD in enumerate((k_NKD, v_NKD)):
        column_D = torch.arange(new_NKD.shape[2])
        kv.index_put_((torch.tensor(part), slot_N1[..., None], head_K1, position_N1[..., None], column_D), new_NKD)


def attend_slots(
    q_NHD: Tensor, kv: tuple[Tensor, Tensor], slot_N: Tensor, bias_NL: Tensor, softcap: float | None = None
) -> Tensor:
    """Returns attention outputs `[N, H, D]` of scaled queries to the keys of their own slots, `[S, K, W, D]`."""
    num_kv_heads, num_keys = kv[0].shape[1], bias_NL.shape[1]
    q_NKG1D = q_NHD.reshape(-1, num_kv_heads, q_NHD.shape[1] // num_kv_heads, 1, q_NHD.shape[2])
    k_NK1LD, v_NK1LD = (part[slot_N][:, :, None, :num_keys] for part in kv)
    score_NKGL = (q_NKG1D * k_NK1LD).sum(-1)
    if softcap is not None:
        score_NKGL = torch.tanh(score_NKGL / softcap) * softcap
    score_NKGL = score_NKGL + bias_NL[:, None, None]
    weight_NKGL = torch.exp(score_NKGL - score_NKGL.amax(-1, keepdim=True))
    mixed_NKGD = (weight_NKGL[..., None] * v_NK1LD).sum(-2) / weight_NKGL.sum(-1, keepdim=True)
    return mixed_NKGD.reshape(-1, q_NHD.shape[1], mixed_NKGD.shape[-1])


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
        bias_NL = torch.where(due.key_L > due.position_N[:, None], -torch.inf, 0.0)
        x_NE = F.embedding(due.ids_N, weights.embed)
        for layer, kv in zip(weights.layers, kvs, strict=True):
            q_NHD, k_NKD, v_NKD = self._heads(layer, x_NE)
            q_NHD = _rotate(q_NHD * self.config.head_width**-0.5, cos_N1D, sin_N1D)
            write_slots(kv, _rotate(k_NKD, cos_N1D, sin_N1D), v_NKD, due)
            attended_NHD = attend_slots(q_NHD, (kv[0], kv[1]), due.slot_N, bias_NL)
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
