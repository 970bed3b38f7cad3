"""The attention of transformers' models inside our passes: over packed sequences, or over an engine's cache.

One function is registered with transformers' `AttentionInterface`. The masks that a model makes are replaced by a
`PositionMask`: it holds the attention of the pass and the model's own mask function (causal, sliding windows, chunks),
which is asked by the positions of tokens in their sequences. A block that the backward pass computes again has the mask
among its arguments, so it finds the same attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.language_model import KvShape
from agentgym.model.ops.flash_attention import AttentionLevel, flash_attention, is_flash_attention
from agentgym.model.ops.tree_attention import is_tree_attention, tree_attention
from agentgym.model.packed_layout import Block, PackedLayout, split_histories

__all__ = [
    "HOOK",
    "BatchAttention",
    "KeptKeys",
    "KvProbe",
    "PackedAttention",
    "PassAttention",
    "PositionMask",
    "Scores",
    "attend",
    "attention_of",
    "first_keys",
    "register_hook",
]

# Shape suffixes: N tokens of a pass (B sequences of T tokens), T queries, L keys, H query heads, K key/value heads, D
# width of keys or values.

HOOK = "agentgym"
"""The name of our attention in transformers."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The treatment of the products of queries and keys in one layer."""

    scale: float
    softcap: float | None = None
    sinks_H: Tensor | None = None
    """The logit of attending to nothing, by head."""


class PassAttention(Protocol):
    """The attention of all layers in one pass."""

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        """Returns the attention outputs `[N, H, D]` of all tokens."""


class PositionMask:
    """A model's own rule of which positions a token attends to."""

    def __init__(self, rule: Callable[..., Tensor], is_causal: bool, attention: PassAttention) -> None:
        self.rule, self.is_causal, self.attention = rule, is_causal, attention
        self.made: dict[object, Any] = {}
        """The values that layers of the pass share, by what the attention chooses as its key."""

    def allowed_TL(self, position_T: Tensor, num_keys: int) -> Tensor:
        """Returns a mask `[T, L]`, true for the keys of its own sequence that a token at each position attends to."""
        keys_L = torch.arange(num_keys, device=position_T.device)
        allowed_TL = self.rule(0, 0, position_T[:, None], keys_L[None])
        return allowed_TL.expand(len(position_T), num_keys)


def first_keys(rule: Callable[..., Tensor], position_T: Tensor) -> Tensor | None:
    """Returns the first key `[T]` that a token at each position attends to, by the rule of a mask.

    None if a token does not attend to all keys from there to its own, or to later ones.
    """
    firsts = []
    for part_T in position_T.split(_RULE_TOKENS):
        key_1L = torch.arange(int(part_T.max()) + 1, device=part_T.device)[None]
        mask_TL = rule(0, 0, part_T[:, None], key_1L).expand(len(part_T), -1)
        first_T = part_T + 1 - mask_TL.sum(-1)
        if not torch.equal(mask_TL, (key_1L >= first_T[:, None]) & (key_1L <= part_T[:, None])):
            return None
        firsts.append(first_T)
    return torch.cat(firsts)


_RULE_TOKENS = 512
"""Positions that are looked at together."""
_attention: ContextVar[PassAttention] = ContextVar("attention")


@contextmanager
def attention_of(attention: PassAttention) -> Iterator[None]:
    """Makes passes of transformers' models inside the context use this attention."""
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


def register_hook() -> None:
    """Registers our attention and masks with transformers; a second call changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(HOOK, _attend_module)
    AttentionMaskInterface.register(HOOK, _make_mask)


def _make_mask(*_: object, mask_function: Callable[..., Tensor] | None = None, **__: object) -> PositionMask:
    from transformers.masking_utils import causal_mask_function

    rule = causal_mask_function if mask_function is None else mask_function
    return PositionMask(rule, rule is causal_mask_function, _attention.get())


def _attend_module(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """Computes the attention of one layer in transformers' form: `[B, H, T, D]` in, `[B, T, H, D]` out."""
    if not isinstance(attention_mask, PositionMask):
        raise ConfigError(f"{type(module).__name__} makes its own attention masks, which is not supported")
    scaling, sinks_H = options.get("scaling"), options.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks_H = getattr(module, "sinks", None) if sinks_H is None else sinks_H
    q_NHD, k_NKD, v_NKD = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    scores, layer = Scores(scale, options.get("softcap"), sinks_H), int(getattr(module, "layer_idx", 0))
    attended_NHD = attention_mask.attention.attend(layer, q_NHD, k_NKD, v_NKD, scores, attention_mask)
    return attended_NHD.unflatten(0, (len(query), -1)), None


def attend(q_BHTD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
    """Returns attention outputs `[B, H, T, D]`; `bias` is 0 or -inf and broadcasts to `[B, H, T, L]`, None is causal.

    With a soft cap or sinks, scores and weights are computed in float32.
    """
    if scores.softcap is None and scores.sinks_H is None:
        how = {"is_causal": True} if bias is None else {"attn_mask": bias}
        return F.scaled_dot_product_attention(q_BHTD, k_BHLD, v_BHLD, scale=scores.scale, **how)
    score = (q_BHTD @ k_BHLD.transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        score = torch.tanh(score / scores.softcap) * scores.softcap
    if bias is None:
        bias = torch.full(score.shape[-2:], -torch.inf, device=score.device).triu(1)
    score = score + bias
    if scores.sinks_H is None:
        return score.softmax(-1).to(v_BHLD.dtype) @ v_BHLD
    sinks = scores.sinks_H.float().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
    return torch.cat([score, sinks], -1).softmax(-1)[..., :-1].to(v_BHLD.dtype) @ v_BHLD


class BatchAttention:
    """Causal attention inside `B` sequences of equal lengths, which begin at the first position."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        repeats = q_NHD.shape[1] // k_NKD.shape[1]
        if repeats > 1:
            k_NKD, v_NKD = k_NKD.repeat_interleave(repeats, 1), v_NKD.repeat_interleave(repeats, 1)
        q_BHTD, k_BHTD, v_BHTD = (x.unflatten(0, (self._num_rows, -1)).transpose(1, 2) for x in (q_NHD, k_NKD, v_NKD))
        bias_TT = None if mask.is_causal else self._bias(mask, q_BHTD)
        return attend(q_BHTD, k_BHTD, v_BHTD, bias_TT, scores).transpose(1, 2).flatten(0, 1)

    def _bias(self, mask: PositionMask, q_BHTD: Tensor) -> Tensor:
        length = q_BHTD.shape[2]
        if "batch" not in mask.made:
            allowed_TT = mask.allowed_TL(torch.arange(length, device=q_BHTD.device), length)
            bias_TT = torch.zeros(allowed_TT.shape, dtype=q_BHTD.dtype, device=q_BHTD.device)
            mask.made["batch"] = bias_TT.masked_fill_(~allowed_TT, -torch.inf)
        bias: Tensor = mask.made["batch"]
        return bias


class PackedAttention:
    """Attention inside the sequences of a packed layout, each shared prefix once."""

    def __init__(self, layout: PackedLayout) -> None:
        self._layout = layout

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        layout, rows = self._layout, self._layout.every
        is_plain = mask.is_causal and scores.softcap is None and scores.sinks_H is None
        if is_plain and rows.parts and is_tree_attention(q_NHD, v_NKD):
            return tree_attention(q_NHD, k_NKD, v_NKD, rows.parts, scores.scale)
        is_flash = scores.softcap is None and is_flash_attention(q_NHD, v_NKD)
        if is_flash and (levels := self._levels(mask)) is not None:
            return flash_attention(q_NHD, k_NKD, v_NKD, levels, scores.scale, scores.sinks_H)
        repeats = q_NHD.shape[1] // k_NKD.shape[1]
        if repeats > 1:
            k_NKD, v_NKD = k_NKD.repeat_interleave(repeats, 1), v_NKD.repeat_interleave(repeats, 1)
        keys, values = split_histories(k_NKD, layout), split_histories(v_NKD, layout)
        sizes = [*(block.num_rows for block in rows.blocks), rows.num_padding]
        *queries, _ = q_NHD.split(sizes)
        *positions, _ = rows.position_U.split(sizes)
        attended = []
        for number, block in enumerate(rows.blocks):
            first, bias = self._bias(number, block, positions[number], mask, q_NHD.dtype)
            seen = slice(first, block.num_keys)
            parts = queries[number], keys[block.segment][seen], values[block.segment][seen]
            q_HTD, k_HLD, v_HLD = (part.transpose(0, 1)[None] for part in parts)
            attended.append(attend(q_HTD, k_HLD, v_HLD, bias, scores)[0].transpose(0, 1))
        padding = q_NHD.new_zeros(rows.num_padding, q_NHD.shape[1], v_NKD.shape[-1])
        return torch.cat([*attended, padding])

    def _levels(self, mask: PositionMask) -> Sequence[AttentionLevel] | None:
        """Returns the attention of the mask for the GPU's kernel; None if its tokens see other keys than a stretch."""
        if mask.is_causal:
            return self._layout.levels
        if "levels" not in mask.made:
            position_P = torch.arange(max(self._layout.seqlens), device=self._layout.place_N.device)
            first_P = first_keys(mask.rule, position_P)
            mask.made["levels"] = None if first_P is None else self._layout.levels_from(first_P.cpu().numpy())
        levels: Sequence[AttentionLevel] | None = mask.made["levels"]
        return levels

    def _bias(
        self, number: int, block: Block, position_T: Tensor, mask: PositionMask, dtype: torch.dtype
    ) -> tuple[int, Tensor | None]:
        """Returns the first key that any row of the block sees, and the bias from there on; None is plainly causal."""
        if mask.is_causal:
            return 0, None if block.bias_TL is None else block.bias_TL.to(dtype)
        if number not in mask.made:
            allowed_TL = mask.allowed_TL(position_T, block.num_keys)
            first = int(allowed_TL.any(0).int().argmax())
            mask_TL = allowed_TL[:, first:]
            bias_TL = torch.zeros(mask_TL.shape, dtype=dtype, device=position_T.device)
            mask.made[number] = first, bias_TL.masked_fill_(~mask_TL, -torch.inf)  # no view: GPU kernels need alignment
        bias: tuple[int, Tensor] = mask.made[number]
        return bias


class KeptKeys(BatchAttention):
    """Attention of one sequence that is read in parts: each call of a pass sees its keys of earlier ones."""

    def __init__(self) -> None:
        super().__init__(1)
        self._inputs: list[list[Tensor]] = []
        self._num_calls = 0

    def begin_pass(self) -> None:
        """Has the next call be the first one of a pass."""
        self._num_calls = 0

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        """Attends to the keys of all parts so far; computes the outputs of earlier parts again."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        parts = zip(*self._inputs[call : call + 1], (q_NHD, k_NKD, v_NKD), strict=True)
        q_LHD, k_LKD, v_LKD = whole = [torch.cat(part) for part in parts]
        self._inputs[call : call + 1] = [whole]
        return super().attend(layer, q_LHD, k_LKD, v_LKD, scores, mask)[-len(q_NHD) :]


class KvProbe(PackedAttention):
    """Attention that also notes the layer of each call, and the sizes of its keys and values."""

    def __init__(self, layout: PackedLayout) -> None:
        super().__init__(layout)
        self.calls: list[tuple[int, KvShape]] = []

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        self.calls.append((layer, KvShape(k_NKD.shape[1], max(k_NKD.shape[-1], v_NKD.shape[-1]))))
        return super().attend(layer, q_NHD, k_NKD, v_NKD, scores, mask)
