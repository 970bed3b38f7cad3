"""One forward pass of the in-process engine over the tokens that are due, with bits independent of other requests.

Every row (a token at a position of a slot) gets the same bits however the step is composed: matrix products
(`row_product`), norms and attention (`attention`) treat rows alike. So keys and values at a position depend only on the
tokens up to it and on the weights, and any prefix may be shared, dropped or recomputed.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.attention import SlotAttention
from agentgym.engines.local.kernels.row_products import row_product
from agentgym.engines.local.kernels.slot_attention import attends_compiled
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows, pad_rows
from agentgym.model.decoder import Decoder, DecoderLayer

__all__ = ["StepRunner"]

# Shape suffixes: N rows of the step, R rows whose logits are wanted, H query heads, K key/value heads, D head width,
# E model width, V vocabulary, W window.


class StepRunner:
    """Runs steps of one model over one cache."""

    def __init__(self, model: Decoder, cache: SlotCache) -> None:
        c = model.config
        self.model, self.cache = model, cache
        self._num_rotated = c.num_heads + c.num_kv_heads
        # The rotation of the queries includes their scale, so that scores need no pass of their own.
        self._scale_H1 = torch.ones(self._num_rotated, 1, device=model.cos_TD.device, dtype=model.cos_TD.dtype)
        self._scale_H1[: c.num_heads] = c.head_width**-0.5
        self._attends_compiled = attends_compiled(model.embed)

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        model, cache, device = self.model, self.cache, self.model.embed.device
        ids_N = pad_rows(cache.tokens_SW[rows.slot_N, rows.position_N])
        attention = SlotAttention(cache, rows, compiled=self._attends_compiled)
        index_N = attention.position_N
        cos_NHD, sin_NHD = (table_TD[index_N, None] * self._scale_H1 for table_TD in (model.cos_TD, model.sin_TD))
        x_NE = F.embedding(torch.from_numpy(ids_N).to(device), model.embed)
        for layer, kv in zip(model.layers, cache.kv, strict=True):
            assert isinstance(layer, DecoderLayer)
            qkv_NHD = self._project(layer, x_NE, cos_NHD, sin_NHD)
            heads = [layer.config.num_heads, layer.config.num_kv_heads, layer.config.num_kv_heads]
            attended_NHD = attention.attend(kv, *qkv_NHD.split(heads, 1))
            x_NE = self._mix(layer, x_NE, attended_NHD)
        return self._logits(x_NE, rows.output_R)

    def _project(self, layer: DecoderLayer, x_NE: Tensor, cos_NHD: Tensor, sin_NHD: Tensor) -> Tensor:
        """Computes queries, keys (both rotated) and values of every row, `[N, H + 2K, D]`."""
        c = layer.config
        h_NE = torch.rms_norm(x_NE, (c.width,), layer.input_norm, c.norm_eps)
        flat = row_product(h_NE, layer.qkv)
        if layer.qkv_bias is not None:
            flat += layer.qkv_bias
        qkv_NHD = flat.view(x_NE.shape[0], -1, c.head_width)
        rotated_NHD = qkv_NHD[:, : self._num_rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_NHD = torch.rms_norm(qkv_NHD[:, : c.num_heads], (c.head_width,), layer.q_norm, c.norm_eps)
            k_NKD = torch.rms_norm(rotated_NHD[:, c.num_heads :], (c.head_width,), layer.k_norm, c.norm_eps)
            source_NHD = torch.cat((q_NHD, k_NKD), 1)
        else:
            source_NHD = rotated_NHD
        swapped_NHD = source_NHD.roll(c.head_width // 2, -1).mul_(sin_NHD)
        torch.addcmul(swapped_NHD, source_NHD, cos_NHD, out=rotated_NHD)
        return qkv_NHD

    def _mix(self, layer: DecoderLayer, x_NE: Tensor, attended_NHD: Tensor) -> Tensor:
        """Adds the attention output and the feed-forward to the residual stream."""
        c = layer.config
        x_NE = row_product(attended_NHD.flatten(1), layer.out, x_NE)
        h_NE = torch.rms_norm(x_NE, (c.width,), layer.ffn_norm, c.norm_eps)
        gate_NF, up_NF = row_product(h_NE, layer.gate_up).chunk(2, -1)
        return row_product(F.silu(gate_NF).mul_(up_NF), layer.down, x_NE)

    def _logits(self, x_NE: Tensor, output_R: NDArray[np.int64]) -> Tensor:
        if len(output_R) < x_NE.shape[0]:
            x_NE = x_NE[torch.from_numpy(pad_rows(output_R)).to(x_NE.device)]
        h_RE = torch.rms_norm(x_NE, (self.model.config.width,), self.model.final_norm, self.model.config.norm_eps)
        return row_product(h_RE, self.model.head_weight)[: len(output_R)]
