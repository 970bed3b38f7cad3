"""A decoder-only transformer of the Llama, Mistral, Qwen2 and Qwen3 families, shared by training and sampling.

Projections that read the same input are stored as one tensor (q, k, v and gate, up). The trainer and the in-process
engine use the same memory. `model_folder` maps the tensors to and from the published parameter names.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentgym.model.decoder_config import GATE_UP, QKV, DecoderConfig
from agentgym.model.exchange import Exchange
from agentgym.model.language_model import KvShape, LanguageModel, LayerCost
from agentgym.model.linear import linear
from agentgym.model.lora_layer import LayerAdapters
from agentgym.model.ops.flash_attention import flash_attention, is_flash_attention
from agentgym.model.ops.rms_norm import rms_norm
from agentgym.model.ops.tree_attention import is_tree_attention, tree_attention
from agentgym.model.packed_layout import LayoutRows, PackedLayout, split_histories
from agentgym.model.rope import rope_frequencies
from agentgym.types import JSON

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer", "apply_rope"]

# Shape suffixes: N packed tokens, H query heads, K key/value heads, D head width, E model width, T positions,
# V vocabulary.


def apply_rope(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Applies rotary position embedding in the half-split layout of published checkpoints (Su et al. 2021).

    `cos_ND` and `sin_ND` hold the D/2 frequencies twice; the first half of `sin_ND` is negated.
    """
    if _has_kernels(x_NHD):
        from agentgym.model.ops.gpu_rows import rotate

        return rotate(x_NHD, cos_ND, sin_ND)
    half = x_NHD.shape[-1] // 2
    return torch.addcmul(x_NHD * cos_ND[:, None], x_NHD.roll(half, -1), sin_ND[:, None])


def _gate(flat_NF: Tensor) -> Tensor:
    """Returns `silu(a) * b` of the halves `a` and `b` of each row."""
    if _has_kernels(flat_NF):
        from agentgym.model.ops.gpu_rows import gate

        return gate(flat_NF)
    a_NF, b_NF = flat_NF.chunk(2, -1)
    return F.silu(a_NF) * b_NF


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and find_spec("triton") is not None


class DecoderLayer(nn.Module):
    """One pre-norm block: attention with grouped key/value heads, then a gated feed-forward."""

    recomputes = False
    """True if the backward pass recomputes the block's inner states instead of keeping them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_width, self.kv_width = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
        self.input_norm = nn.Parameter(torch.ones(c.width))
        self.qkv = nn.Parameter(torch.empty(self.q_width + 2 * self.kv_width, c.width))
        self.qkv_bias = nn.Parameter(torch.zeros(self.qkv.shape[0])) if c.qkv_bias else None
        self.q_norm = nn.Parameter(torch.ones(c.head_width)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_width)) if c.qk_norm else None
        self.out = nn.Parameter(torch.empty(c.width, self.q_width))
        self.ffn_norm = nn.Parameter(torch.ones(c.width))
        self.gate_up = nn.Parameter(torch.empty(2 * c.ffn_width, c.width))
        self.down = nn.Parameter(torch.empty(c.width, c.ffn_width))
        self.adapters: LayerAdapters | None = None

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Returns the outputs and inputs of each published projection; its weights are part of a layer's matrix."""
        c = self.config
        outputs = dict(zip(QKV, (self.q_width, self.kv_width, self.kv_width), strict=True)) | {"o_proj": c.width}
        outputs |= dict.fromkeys(GATE_UP, c.ffn_width) | {"down_proj": c.width}
        inputs = {"o_proj": self.q_width, "down_proj": c.ffn_width}
        return {name: (number, inputs.get(name, c.width)) for name, number in outputs.items()}

    def forward(self, x_NE: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout, is_last: bool) -> Tensor:
        """Returns the residual stream after this block, of all computed tokens (the last block: of the wanted)."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return self._block(x_NE, rope, layout, is_last)
        computed: Tensor = checkpoint(
            self._block, x_NE, rope, layout, is_last, use_reentrant=False, preserve_rng_state=False
        )
        return computed

    def _block(self, x_NE: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout, is_last: bool) -> Tensor:
        cuts = is_last and layout.wanted is not layout.every
        rows, exchange = layout.wanted if cuts else layout.every, layout.exchange
        q_RHD, k_NKD, v_NKD = self._project(x_NE, rope, rows if cuts else None, exchange)
        attended_RHD = _attend(*exchange.to_heads(q_RHD, k_NKD, v_NKD, cuts), layout, rows)
        return self._mix(x_NE[rows.own_U] if cuts else x_NE, exchange.to_tokens(attended_RHD, cuts), exchange)

    def _project(
        self, x_NE: Tensor, rope: tuple[Tensor, Tensor], rows: LayoutRows | None, exchange: Exchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns normalized, rotated queries `[N, H, D]` of all or some rows; keys, values `[N, K, D]` of all."""
        c, weight = self.config, exchange.weight
        cos_ND, sin_ND = rope
        q_width, kv_width = self.q_width // exchange.num_parts, self.kv_width // exchange.num_parts
        h_NE = exchange.gather_tokens(rms_norm(x_NE, weight(self.input_norm), c.norm_eps))
        if rows is None:
            flat_q, flat_kv = self._qkv(h_NE, slice(None), QKV, exchange).split([q_width, 2 * kv_width], 1)
        else:
            flat_q = self._qkv(h_NE[rows.index_U], slice(q_width), QKV[:1], exchange)
            flat_kv = self._qkv(h_NE, slice(q_width, None), QKV[1:], exchange)
        q_NHD = flat_q.unflatten(1, (-1, c.head_width))
        k_NKD, v_NKD = flat_kv.unflatten(1, (-1, c.head_width)).chunk(2, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHD = rms_norm(q_NHD, weight(self.q_norm), c.norm_eps)
            k_NKD = rms_norm(k_NKD, weight(self.k_norm), c.norm_eps)
        cos_QD, sin_QD = (cos_ND, sin_ND) if rows is None else (cos_ND[rows.index_U], sin_ND[rows.index_U])
        return apply_rope(q_NHD, cos_QD, sin_QD), apply_rope(k_NKD, cos_ND, sin_ND), v_NKD

    def _qkv(self, h_NE: Tensor, outputs: slice, projections: tuple[str, ...], exchange: Exchange) -> Tensor:
        weight = exchange.weight(self.qkv)
        # The gradient of a slice is a copy of the whole, so all of the weight is taken without one.
        flat = linear(h_NE, weight if outputs == slice(None) else weight[outputs])
        flat = flat if self.qkv_bias is None else flat + exchange.weight(self.qkv_bias)[outputs]
        return self._add_adapters(flat, h_NE, projections)

    def _add_adapters(self, product_NO: Tensor, x_NI: Tensor, projections: tuple[str, ...]) -> Tensor:
        """Returns the outputs of projections of `x_NI` plus what the adapters add to them."""
        added_NO = None if self.adapters is None else self.adapters(x_NI, *projections)
        return product_NO if added_NO is None else product_NO + added_NO

    def _mix(self, x_NE: Tensor, attended_NHD: Tensor, exchange: Exchange) -> Tensor:
        """Adds the attention output and the feed-forward to the residual stream."""
        c, weight, summed = self.config, exchange.weight, exchange.sum_parts
        flat = attended_NHD.flatten(1)
        x_NE = x_NE + summed(self._add_adapters(linear(flat, weight(self.out)), flat, ("o_proj",)))
        h_NE = exchange.gather_tokens(rms_norm(x_NE, weight(self.ffn_norm), c.norm_eps))
        inner = _gate(self._add_adapters(linear(h_NE, weight(self.gate_up)), h_NE, GATE_UP))
        return x_NE + summed(self._add_adapters(linear(inner, weight(self.down)), inner, ("down_proj",)))


class Decoder(LanguageModel):
    """The whole model. `hidden_states` is differentiable; `logits` are computed only where they are needed."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.width, self.context_window = config.vocab_size, config.width, config.context_window
        self.num_layers = config.num_layers
        queries, keys = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
        self.layer_cost = LayerCost(config.width * (2 * queries + 2 * keys + 3 * config.ffn_width), 2 * queries)
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.head = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.width))
        if not self.final_norm.is_meta:  # its functions there import torch's compiler, more than a second
            self.make_rope()

    def make_rope(self) -> None:
        """Computes the tables of the rotary embedding; a model that was made without memory has none yet."""
        c = self.config
        frequency_D, factor = rope_frequencies(
            c.head_width, c.rope_theta, c.rope_scaling, context_window=c.context_window
        )
        angle_TD = torch.outer(torch.arange(c.context_window, dtype=torch.float64), frequency_D)
        cos_TD, sin_TD = angle_TD.cos() * factor, angle_TD.sin() * factor
        self.register_buffer("cos_TD", torch.cat([cos_TD] * 2, -1).float(), persistent=False)
        self.register_buffer("sin_TD", torch.cat([-sin_TD, sin_TD], -1).float(), persistent=False)

    @torch.no_grad()
    def initialize(self, seed: int) -> Decoder:
        """Draws fresh weights: normal with deviation 0.02, residual outputs scaled by 1/sqrt(2 layers)."""
        generator = torch.Generator().manual_seed(seed)
        scale = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 * (scale if name.endswith((".out", ".down")) else 1.0)
                parameter.normal_(0.0, std, generator=generator)
        return self

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The layers."""
        return tuple(self.layers)

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """The sizes of keys and values, equal in all layers."""
        return (KvShape(self.config.num_kv_heads, self.config.head_width),) * self.config.num_layers

    @property
    def head_weight(self) -> Tensor:
        """The `[V, E]` output matrix (the embedding itself if tied)."""
        return self.embed if self.head is None else self.head

    def hidden_states(self, ids_N: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the final normalized states `[M, E]` of the wanted entries of packed sequences (by default of all N).

        Attention is causal and stays inside each sequence. Among ranks that share the pass, each returns its own
        entries.
        """
        every = layout.every
        rope = self.cos_TD[every.position_U], self.sin_TD[every.position_U]
        x_NE = layout.exchange.embed_ids(ids_N[layout.source_U], self.embed)
        for index, layer in enumerate(self.layers):
            x_NE = layer(x_NE, rope, layout, index == self.config.num_layers - 1)
        return rms_norm(x_NE[layout.entry_M], layout.exchange.weight(self.final_norm), self.config.norm_eps)

    def set_recompute(self, recomputes: bool) -> None:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.recomputes = recomputes

    def to_hf(self) -> dict[str, JSON]:
        return self.config.to_hf()


def _attend(q_RHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: PackedLayout, rows: LayoutRows) -> Tensor:
    if rows.parts and is_tree_attention(q_RHD, v_NKD):
        return tree_attention(q_RHD, k_NKD, v_NKD, rows.parts)
    if is_flash_attention(q_RHD, v_NKD):
        return _attend_levels(q_RHD, k_NKD, v_NKD, layout, rows)
    # A few calls a sequence: no padding, and no sequence's bits depend on its neighbours. Keys and values are repeated
    # by hand because the backward of `enable_gqa` on CPU is four times slower (torch 2.13), and small products are
    # several times slower there in bfloat16 than in float32.
    dtype = q_RHD.dtype
    if q_RHD.device.type == "cpu":
        q_RHD, k_NKD, v_NKD = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q_RHD, k_NKD, v_NKD))
    repeats = q_RHD.shape[1] // k_NKD.shape[1]
    if repeats > 1:
        k_NKD, v_NKD = k_NKD.repeat_interleave(repeats, 1), v_NKD.repeat_interleave(repeats, 1)
    keys, values = (split_histories(x_NHD, layout) for x_NHD in (k_NKD, v_NKD))
    *queries, padding = q_RHD.split([*(block.num_rows for block in rows.blocks), rows.num_padding])
    attended = []
    for block, q_THD in zip(rows.blocks, queries, strict=True):
        parts = (q_THD, keys[block.segment][: block.num_keys], values[block.segment][: block.num_keys])
        q_HTD, k_HLD, v_HLD = (part.transpose(0, 1)[None] for part in parts)
        bias = {"is_causal": True} if block.bias_TL is None else {"attn_mask": block.bias_TL.to(q_RHD.dtype)}
        attended.append(F.scaled_dot_product_attention(q_HTD, k_HLD, v_HLD, **bias)[0].transpose(0, 1))
    return torch.cat([*attended, torch.zeros_like(padding)]).to(dtype)


def _attend_levels(q_RHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: PackedLayout, rows: LayoutRows) -> Tensor:
    """Attends all computed tokens at once, of which those that are not among the rows have no query."""
    if rows.token_U is None:
        return flash_attention(q_RHD, k_NKD, v_NKD, layout.levels)
    every = q_RHD.new_zeros(len(k_NKD), *q_RHD.shape[1:]).index_copy(0, rows.token_U, q_RHD[: len(rows.token_U)])
    attended_RHD = flash_attention(every, k_NKD, v_NKD, layout.levels)[rows.token_U]
    return F.pad(attended_RHD, (0, 0, 0, 0, 0, rows.num_padding))
