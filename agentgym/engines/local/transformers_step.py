"""One forward pass of the in-process engine through a model of transformers, with bits independent of other requests.

The model computes all rows of the step as one sequence, and attention reads each row's own slot (`attention`). A model
with recurrent layers computes decoded tokens as a batch, and each further part of a prompt in a pass of its own. On a
CPU, matrix products with weights are replaced by `row_product`, which treats all rows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentgym.engines.local.attention import SlotAttention
from agentgym.engines.local.kernels.row_products import padded_rows, row_product
from agentgym.engines.local.kernels.slot_attention import attends_compiled
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows, pad_rows
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.pass_attention import PositionMask, Scores
from agentgym.model.routing import BatchRouting, PassRouting, routing_of
from agentgym.model.state_cache import PassCache
from agentgym.model.transformers_model import TransformersModel

__all__ = ["TransformersStep"]

# Shape suffixes: N rows of the step, H query heads, K key/value heads, D width of a head, R rows whose logits are
# wanted, V vocabulary, I inputs and O outputs of a product.


class TransformersStep:
    """Runs steps of a model of transformers over one cache."""

    def __init__(self, model: TransformersModel, cache: SlotCache) -> None:
        self.model, self.cache = model, cache
        self._attends_compiled = attends_compiled(model.embed)
        is_cpu = model.embed.device.type == "cpu"
        self._products = _RowProducts() if is_cpu else nullcontext()

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys, values and states into the cache."""
        if not self.model.continues:
            prefixes = [(int(rows.slot_N[row]), int(rows.position_N[row]) + 1) for row in rows.output_R]
            whole = [self._logits_of_whole(*prefix) for prefix in prefixes]
            return torch.cat(whole) if whole else self.model.embed.new_zeros(0, self.model.vocab_size)
        with self._products:
            parts = self._split(rows) if self.cache.states or self.model.continues_by_tokens else [rows]
            states_NE = torch.cat([self._pass(part) for part in parts])
            return self.model.logits(states_NE[torch.from_numpy(rows.output_R).to(states_NE.device)])

    def _logits_of_whole(self, slot: int, length: int) -> Tensor:
        """Computes the logits `[1, V]` after the first `length` tokens of a slot, from these tokens alone."""
        cache, device = self.cache, self.model.embed.device
        ids_T = torch.from_numpy(cache.tokens_SW[slot, :length]).to(device)
        layout = PackedLayout([length], device, mask_N=torch.arange(length) == length - 1)
        if cache.experts_SWRK is not None:
            layout.routing = BatchRouting([length])
        states_1E = self.model.hidden_states(ids_T, layout)
        if cache.experts_SWRK is not None and layout.routing is not None:
            cache.experts_SWRK[slot, :length] = layout.routing.chosen_NRK().to(torch.int16).cpu().numpy()
        return self.model.logits(states_1E)

    def _pass(self, rows: Rows) -> Tensor:
        """Computes final states `[N, E]` (perhaps of further rows after them) in one pass."""
        cache, device = self.cache, self.model.embed.device
        slots = SlotAttention(cache, rows, compiled=self._attends_compiled, pads=not cache.states)
        attention = _CallAttention(cache, slots)
        ids_N = cache.tokens_SW[rows.slot_N, rows.position_N]
        if not cache.states:
            ids_1N = torch.from_numpy(pad_rows(ids_N)).to(device)[None]
            return self._states(rows, ids_1N, slots.position_N[None], attention)
        slot_B = torch.from_numpy(rows.slot_N if rows.num_decode else rows.slot_N[:1]).to(device)
        first_B = torch.from_numpy(rows.position_N[: len(slot_B)] == 0).to(device)
        before = {name: state_S[slot_B] for name, state_S in cache.states.items()}
        for state_B in before.values():
            state_B[first_B] = 0
        after = PassCache(self.model.hf, before)
        shape = len(slot_B), -1
        ids_BT, position_BT = torch.from_numpy(ids_N).to(device).view(shape), slots.position_N.view(shape)
        states_NE = self._states(rows, ids_BT, position_BT, attention, after)
        for name, state_B in after.states().items():
            cache.states[name][slot_B] = state_B
        return states_NE

    def _split(self, rows: Rows) -> list[Rows]:
        """Returns the decoded rows as sequences of one token, and each further part of a prompt alone.

        A part that the model does not continue as a whole is split into its tokens.
        """
        parts, first = [], rows.num_decode
        nothing = np.zeros(0, np.int64)
        if first:
            parts.append(Rows(rows.slot_N[:first], rows.position_N[:first], first, (), nothing))
        for slot, start, size in rows.extends:
            step = 1 if start and self.model.continues_by_tokens else size
            for begin in range(first, first + size, step):
                own, extend = slice(begin, begin + step), (slot, start + begin - first, step)
                parts.append(Rows(rows.slot_N[own], rows.position_N[own], 0, (extend,), nothing))
            first += size
        return parts

    def _states(self, rows: Rows, *inputs: Any) -> Tensor:
        """Computes final states, and records the experts of the rows where that is wanted."""
        experts_SWRK = self.cache.experts_SWRK
        if experts_SWRK is None:
            return self.model.states(*inputs)
        routing = PassRouting()
        with routing_of(routing):
            states_NE = self.model.states(*inputs)
        chosen_NRK = routing.chosen_PRK[: len(rows.slot_N)].to(torch.int16)
        experts_SWRK[rows.slot_N, rows.position_N] = chosen_NRK.cpu().numpy()
        return states_NE


class _CallAttention:
    """Attention of each row of a step to the keys of its own slot, by the calls of a model's pass."""

    def __init__(self, cache: SlotCache, rows: SlotAttention) -> None:
        self._kvs, self._rows = iter(cache.kv), rows

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        """Stores the keys and values, and attends to those of all positions."""
        return self._rows.attend(next(self._kvs), q_NHD * scores.scale, k_NKD, v_NKD, scores, mask)


_ELEMENTWISE = (
    *(torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.tanh, torch.Tensor.tanh, F.tanh),
    *(torch.exp, torch.Tensor.exp, F.silu, F.gelu, F.softplus, F.logsigmoid),
)
"""Functions whose last bits depend on whether a number is among the last of a tensor, and on its neighbours."""
_LANES = 64
"""A multiple of the numbers that a processor computes at once."""


class _RowProducts(TorchFunctionMode):
    """Replaces the products of a model with its weights, and functions of single numbers.

    So a row gets the same bits whatever the other rows are.
    """

    def __init__(self) -> None:
        super().__init__()
        matmul = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
        self._own: dict[object, Callable[..., Tensor]] = {F.linear: self._linear, torch.bmm: self._bmm}
        self._own |= dict.fromkeys(matmul, self._matmul) | {torch.Tensor.bmm: self._bmm}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes one function of torch."""
        call: Callable[..., Any] = self._own.get(func, func)
        if func in _ELEMENTWISE:
            return _in_lanes(func, *args, **(kwargs or {}))
        return call(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x_NI = input.reshape(-1, input.shape[-1])
        num_rows = len(x_NI)
        padding = padded_rows(num_rows) - num_rows
        product_NO = row_product(F.pad(x_NI, (0, 0, 0, padding)) if padding else x_NI, weight)[:num_rows]
        product_NO = product_NO if bias is None else product_NO + bias
        return product_NO.view(*input.shape[:-1], product_NO.shape[1])

    def _matmul(self, input: Tensor, other: Tensor) -> Tensor:
        if other.ndim == 2 and input.ndim >= 2:
            return self._linear(input, other.t())
        if isinstance(other, nn.Parameter) and input.ndim == other.ndim == 3:
            return self._bmm(input, other)
        return torch.matmul(input, other)

    def _bmm(self, input: Tensor, mat2: Tensor) -> Tensor:
        if not isinstance(mat2, nn.Parameter):
            return torch.bmm(input, mat2)
        return torch.stack([self._linear(x_NI, weight_IO.t()) for x_NI, weight_IO in zip(input, mat2, strict=True)])


def _in_lanes(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes a function of single numbers, which are neighbours in memory, with none of them among the last."""
    flat = x.contiguous().flatten()
    padded = F.pad(flat, (0, -x.numel() % _LANES)) if x.numel() % _LANES else flat
    return func(padded, *args, **kwargs)[: x.numel()].view(x.shape)
