"""One forward pass of the in-process engine through a model of transformers, over the tokens that are due.

The model computes all rows of the step as one sequence; attention reads each row's own slot. Its matrix products are
those of transformers, so the last bits of a reply may depend on what else is in flight.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.step import Rows
from agentgym.model.pass_attention import PositionMask, Scores, attend
from agentgym.model.transformers_model import TransformersModel

__all__ = ["TransformersStep"]

# Shape suffixes: N rows of the step, A decoded rows, T rows of a prompt, L keys, H query heads, K key/value heads, D
# width of a head, R rows whose logits are wanted, V vocabulary.


class TransformersStep:
    """Runs steps of a model of transformers over one cache."""

    def __init__(self, model: TransformersModel, cache: SlotCache) -> None:
        self.model, self.cache = model, cache

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        device = self.model.embed.device
        ids_N = torch.from_numpy(self.cache.tokens_SW[rows.slot_N, rows.position_N]).to(device)
        attention = _SlotAttention(self.cache, self.model.kv_index, rows)
        states_NE = self.model.states(ids_N, attention.position_N, attention)
        return self.model.logits(states_NE[torch.from_numpy(rows.wanted_R).to(device)])


class _SlotAttention:
    """Attention of each row of a step to the keys of its own slot."""

    def __init__(self, cache: SlotCache, kv_index: dict[int, int], rows: Rows) -> None:
        device = cache.kv[0].device
        self._cache, self._kv_index = cache, kv_index
        self._slot_N = torch.from_numpy(rows.slot_N).to(device)
        self.position_N = torch.from_numpy(rows.position_N).to(device)
        self._num_decode = rows.num_decode
        self._decode_keys = _num_keys(rows.position_N[: rows.num_decode])
        starts = np.cumsum([rows.num_decode, *(size for _, _, size in rows.extends)]).tolist()
        self._extends = [
            (slice(first, first + size), slot, start + size)
            for first, (slot, start, size) in zip(starts, rows.extends, strict=False)
        ]

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        """See `PassAttention`; stores the keys and values first."""
        kv = self._cache.kv[self._kv_index[layer]]
        keys, values = kv[0, ..., : k_NKD.shape[-1]], kv[1, ..., : v_NKD.shape[-1]]
        keys[self._slot_N, :, self.position_N] = k_NKD
        values[self._slot_N, :, self.position_N] = v_NKD
        repeats = q_NHD.shape[1] // k_NKD.shape[1]
        parts = []
        if self._num_decode:
            rows, seen = slice(self._num_decode), slice(self._decode_keys)
            slot_A = self._slot_N[rows]
            k_AHLD, v_AHLD = (_repeat(states[slot_A, :, seen], repeats) for states in (keys, values))
            bias_A11L = self._bias(mask, rows, self._decode_keys, q_NHD.dtype)[:, None, None]
            parts.append(attend(q_NHD[rows, :, None], k_AHLD, v_AHLD, bias_A11L, scores)[:, :, 0])
        for rows, slot, num_keys in self._extends:
            own = slice(slot, slot + 1)
            k_1HLD, v_1HLD = (_repeat(states[own, :, :num_keys], repeats) for states in (keys, values))
            bias_TL = self._bias(mask, rows, num_keys, q_NHD.dtype)
            parts.append(attend(q_NHD[rows].transpose(0, 1)[None], k_1HLD, v_1HLD, bias_TL, scores)[0].transpose(0, 1))
        return torch.cat(parts)

    def _bias(self, mask: PositionMask, rows: slice, num_keys: int, dtype: torch.dtype) -> Tensor:
        """Returns the bias that hides keys from rows, 0 or -inf, once for all layers with the same mask."""
        key = rows.start, rows.stop
        if key not in mask.made:
            hidden_TL = ~mask.allowed_TL(self.position_N[rows], num_keys)
            bias_TL = torch.zeros(hidden_TL.shape, dtype=dtype, device=hidden_TL.device)
            mask.made[key] = 0, bias_TL.masked_fill_(hidden_TL, -torch.inf)
        return mask.made[key][1]


def _num_keys(position_A: NDArray[np.int64]) -> int:
    return int(position_A.max()) + 1 if len(position_A) else 0


def _repeat(states_AKLD: Tensor, repeats: int) -> Tensor:
    return states_AKLD if repeats == 1 else states_AKLD.repeat_interleave(repeats, 1)
