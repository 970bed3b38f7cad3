"""The in-process engine's step as one graph, compiled by `torch.compile`: the same function as `step`, but faster.

In a small model a step is mostly the cost of calling a hundred operators. Compiled, everything between two matrix
products is one loop over the rows. Attention is one loop too, whether a row was sampled or read, so a token's bits
depend only on the tokens before it and on the weights. They differ in the last place from those of the uncompiled step:
an engine uses one or the other for its whole life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.kv_cache import L_BLOCK, SlotCache, round_up
from agentgym.engines.local.step import Rows, pad_rows
from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.linear import MIN_ROWS, row_linear

__all__ = ["CompiledStep", "compiled_step"]

_log = logging.getLogger(__name__)

# Shape suffixes: N rows, R rows whose logits are wanted, H query heads, K key/value heads, G query heads per key/value
# head, D head width, L padded keys, E model width, V vocabulary, W window.

# The costs of a step, as ratios: another call is worth it if it saves this many (row, key) pairs of attention.
_CALL_COST = 4096
_MOST_ENGINES = 256  # engines that compile in one process; the default of 8 is meant for functions that should not vary

# Indices are the engine's own, so the loops do not check them.
_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "assert_indirect_indexing": False,
    "size_asserts": False,
}


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


class CompiledStep:
    """Runs steps of one model over one cache, on CPU; compiles at its first run (seconds, cached on disk by torch).

    Example: `CompiledStep(model, cache).forward(rows)` returns the `[R, V]` logits that `StepRunner` would return.
    """

    def __init__(self, model: Decoder, cache: SlotCache) -> None:
        if model.embed.device.type != "cpu":
            raise ConfigError(f"the compiled step runs on cpu, and the model is on {model.embed.device}")
        if model.embed.dtype != torch.float32:
            raise ConfigError(f"the compiled step computes in float32, and the model is {model.embed.dtype}")
        self.model, self.cache = model, cache
        self._weights = _weights(model)
        width = model.config.head_width // 2
        cos_WD, sin_WD = model.cos_TD[: cache.window, :width], model.sin_TD[: cache.window, width:]
        self._rope = (cos_WD.contiguous(), sin_WD.contiguous())
        self._key_L = torch.arange(cache.kv[0].shape[3])
        self._step: Callable[..., Tensor] | None = None

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        parts = _parts(rows.position_N)
        if len(parts) == 1:
            return self._run(rows.slot_N, rows.position_N, rows.wanted_R)
        row_of_N = np.full(len(rows.slot_N), -1)
        row_of_N[rows.wanted_R] = np.arange(len(rows.wanted_R))
        logits_RV = self.model.embed.new_empty(len(rows.wanted_R), self.model.config.vocab_size)
        for part in parts:
            wanted = np.flatnonzero(row_of_N[part] >= 0)
            part_RV = self._run(rows.slot_N[part], rows.position_N[part], wanted)
            logits_RV[torch.from_numpy(row_of_N[part][wanted])] = part_RV
        return logits_RV

    def _run(self, slot_N: NDArray[np.int64], position_N: NDArray[np.int64], wanted_R: NDArray[np.int64]) -> Tensor:
        num_keys = round_up(int(position_N.max()) + 1, L_BLOCK)
        indices = (
            pad_rows(self.cache.tokens_SW[slot_N, position_N]),
            pad_rows(slot_N, self.cache.num_slots),
            pad_rows(position_N),
            pad_rows(wanted_R),
        )
        due = (*map(torch.from_numpy, indices), self._key_L[:num_keys])
        if self._step is None:
            self.compile()
        assert self._step is not None
        return self._step(due, self.cache.kv, self._weights, self._rope)[: len(wanted_R)]

    @torch.inference_mode()
    def compile(self) -> None:
        """Compiles now; raises whatever `torch.compile` raises if it cannot (a missing header, a read-only disk)."""
        step = torch.compile(_Graph(self.model.config).step, fullgraph=True, options=_OPTIONS)
        # Traced at sizes that differ, so that the compiler does not take two of them for the same.
        slot_N = torch.full((2 * MIN_ROWS,), self.cache.num_slots)
        zeros_N, zeros_R = torch.zeros_like(slot_N), torch.zeros(MIN_ROWS, dtype=torch.int64)
        due = (zeros_N, slot_N, zeros_N.clone(), zeros_R, self._key_L[: 2 * L_BLOCK])
        for tensor in due:
            torch._dynamo.mark_dynamic(tensor, 0)
        for kv in self.cache.kv:
            torch._dynamo.mark_dynamic(kv, 1)
        # What differs between the engines of a process, such as the model, must not be taken for variable.
        with torch._dynamo.config.patch(cache_size_limit=_MOST_ENGINES, automatic_dynamic_shapes=False):
            step(due, self.cache.kv, self._weights, self._rope)
        self._step = step


def compiled_step(model: Decoder, cache: SlotCache, *, required: bool) -> CompiledStep | None:
    """Returns the compiled step, or None with a warning if it cannot be compiled and is not `required`."""
    try:
        step = CompiledStep(model, cache)
        step.compile()
        return step
    except Exception as error:  # a compiler may fail in any way, and is not needed to continue
        if required:
            raise
        reason = " ".join(str(error).partition("Set TORCHDYNAMO")[0].split())[:300]
        _log.warning("the engine's step could not be compiled and runs uncompiled, slower: %s", reason)
        return None


def _parts(position_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Splits a step's rows into calls of similar positions, ascending, if it pays: rows cost as much as the longest."""
    order_N = np.argsort(position_N, kind="stable")
    length_N = position_N[order_N] // L_BLOCK * L_BLOCK
    parts: list[NDArray[np.int64]] = []
    end = len(order_N)
    while True:
        spared_N = np.arange(end) * (length_N[end - 1] - np.roll(length_N[:end], 1))
        cut = int(spared_N[1:].argmax()) + 1 if end > 1 else 0
        if not cut or spared_N[cut] < _CALL_COST:
            return [order_N[:end], *parts]
        parts.insert(0, order_N[cut:end])
        end = cut


def _weights(model: Decoder) -> _Weights:
    layers = tuple(_LayerWeights(*(getattr(layer, name) for name in _LayerWeights._fields)) for layer in model.layers)
    return _Weights(model.embed, layers, model.final_norm, model.head_weight)


class _Graph:
    """The traced function. It holds only sizes; all tensors are arguments, so that weights stay live."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def step(
        self, due: tuple[Tensor, ...], kvs: tuple[Tensor, ...], weights: _Weights, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Computes logits `[R, V]`; `due` is tokens, slots, positions `[N]`, the wanted rows `[R]`, and 0 to L - 1."""
        ids_N, slot_N, position_N, wanted_R, key_L = due
        cos_N1D, sin_N1D = (table_WD[position_N][:, None] for table_WD in rope)
        bias_NL = torch.where(key_L > position_N[:, None], -torch.inf, 0.0)
        x_NE = F.embedding(ids_N, weights.embed)
        for layer, kv in zip(weights.layers, kvs, strict=True):
            q_NHD, k_NKD, v_NKD = self._heads(layer, x_NE)
            q_NHD = _rotate(q_NHD * self.config.head_width**-0.5, cos_N1D, sin_N1D)
            self._write(kv, torch.cat((_rotate(k_NKD, cos_N1D, sin_N1D), v_NKD), 1), slot_N, position_N)
            x_NE = x_NE + row_linear(self._attend(q_NHD, kv, slot_N, bias_NL), layer.out)
            gate_NF, up_NF = row_linear(self._norm(x_NE, layer.ffn_norm), layer.gate_up).chunk(2, -1)
            x_NE = x_NE + row_linear(F.silu(gate_NF) * up_NF, layer.down)
        return row_linear(self._norm(x_NE[wanted_R], weights.final_norm), weights.head)

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

    def _write(self, kv: Tensor, new_NJD: Tensor, slot_N: Tensor, position_N: Tensor) -> None:
        index_J = torch.arange(2 * self.config.num_kv_heads)
        part_J, head_J = index_J // self.config.num_kv_heads, index_J % self.config.num_kv_heads
        kv.index_put_((part_J[None], slot_N[:, None], head_J[None], position_N[:, None]), new_NJD)

    def _attend(self, q_NHD: Tensor, kv: Tensor, slot_N: Tensor, bias_NL: Tensor) -> Tensor:
        c, num_keys = self.config, bias_NL.shape[1]
        q_NKG1D = q_NHD.reshape(-1, c.num_kv_heads, c.num_heads // c.num_kv_heads, 1, c.head_width)
        k_NK1LD, v_NK1LD = (kv[part][slot_N][:, :, None, :num_keys] for part in (0, 1))
        score_NKGL = (q_NKG1D * k_NK1LD).sum(-1) + bias_NL[:, None, None]
        weight_NKGL = torch.exp(score_NKGL - score_NKGL.amax(-1, keepdim=True))
        mixed_NKGD = (weight_NKGL[..., None] * v_NK1LD).sum(-2) / weight_NKGL.sum(-1, keepdim=True)
        return mixed_NKGD.reshape(-1, c.num_heads * c.head_width)


def _rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    a, b = x_NHD.chunk(2, -1)
    return torch.cat((a * cos_N1D - b * sin_N1D, b * cos_N1D + a * sin_N1D), -1)
