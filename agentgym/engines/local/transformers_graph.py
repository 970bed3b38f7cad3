"""The compiled step of a model of transformers: its own forward pass, traced once into plain operators.

The model runs as it is, over tensors that have no numbers and whose numbers of rows are symbols. Its products
with weights become the operator that treats all rows alike, and its attention that of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

from agentgym.engines.local.kernels.row_products import row_linear
from agentgym.engines.local.kernels.slot_attention import SlotRows, attend_slots
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.errors import ConfigError
from agentgym.model.pass_attention import PositionMask, Scores, first_keys
from agentgym.model.transformers_model import TransformersModel

__all__ = ["StepGraph", "StepInputs", "has_static_step", "step_graph"]

# Shape suffixes: N rows, R rows whose logits are wanted, H query heads, K key/value heads, D head width, W window, I
# inputs and O outputs of a product.


_TRACED_ROWS, _TRACED_WANTED = 12, 8
"""The rows and the wanted rows of the traced step; they differ, for each number is a symbol."""


class StepInputs(NamedTuple):
    """The rows of a step, by their tokens, slots, positions and common keys, and the wanted ones."""

    ids_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    root_N: Tensor
    common_N: Tensor
    wanted_R: Tensor


@dataclass(frozen=True)
class StepGraph:
    """A function to compile, which returns logits `[R, V]`, and the weights that it is given."""

    step: Callable[[StepInputs, tuple[Tensor, ...], Any], Tensor]
    """Takes the rows, the keys and values of all layers, and the weights: it holds no tensor itself, so that they stay
    live."""
    weights: Any


def has_static_step(model: TransformersModel) -> bool:
    """True if the operators of a step are the same whatever its tokens are, and keep no states."""
    return model.packs and not model.routers and model.continues


def step_graph(model: TransformersModel, cache: SlotCache) -> StepGraph:
    """Traces the computation of a step of the model over a cache."""
    # Here, because they take half a second, and most engines trace nothing.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, SymbolicContext

    tensors = dict(model.hf.named_parameters()) | dict(model.hf.named_buffers())
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    # Equal sizes are one symbol.
    symbols: SymbolicContext = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
    sizes = [_TRACED_WANTED if name == "wanted_R" else _TRACED_ROWS for name in StepInputs._fields]
    free = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    inputs = [mode.from_tensor(x, symbolic_context=symbols) for x in free]
    inputs += [mode.from_tensor(x, static_shapes=True) for x in (*cache.kv, *tensors.values())]
    num_inputs, num_kvs = len(StepInputs._fields), len(cache.kv)

    rules: list[Callable[..., Tensor]] = []

    def compute(*given: Tensor) -> Tensor:
        due, kvs = StepInputs(*given[:num_inputs]), given[num_inputs:][:num_kvs]
        own = dict(zip(tensors, given[num_inputs + num_kvs :], strict=True))
        attention = _TracedAttention(due, kvs, cache.window, rules)
        with torch.no_grad(), _reparametrize_module(model.hf, own, tie_weights=True), _TracedProducts():
            states_NE = model.states(due.ids_N[None], due.position_N[None], attention)
            return model.logits(states_NE[due.wanted_R])

    traced = make_fx(compute, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    for rule in rules:
        if first_keys(rule, torch.arange(cache.window)) is None:
            raise ConfigError("attention to keys that are no neighbours is not compiled")

    def step(due: StepInputs, kvs: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
        logits_RV: Tensor = traced(*due, *kvs, *weights)
        return logits_RV

    return StepGraph(step, tuple(tensors.values()))


class _TracedAttention:
    """Attention of each row of a step to the keys of its own slot, as operators."""

    def __init__(self, due: StepInputs, kvs: Sequence[Tensor], window: int, rules: list[Callable[..., Tensor]]) -> None:
        """`kvs` are the keys and values of each call in a pass; `rules` gets those of all masks that are not causal."""
        self._due, self._kvs, self._window, self._rules = due, iter(kvs), window, rules
        self._firsts: dict[int, Tensor | None] = {}

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scores, mask: PositionMask
    ) -> Tensor:
        """See `PassAttention`; stores the keys and values first."""
        due = self._due
        if id(mask) not in self._firsts:
            self._firsts[id(mask)] = None if mask.is_causal else self._first_N(mask)
        rows = SlotRows(due.slot_N, due.position_N, self._firsts[id(mask)], due.root_N, due.common_N)
        qkv = q_NHD * scores.scale, k_NKD, v_NKD
        return attend_slots(qkv, next(self._kvs), rows, scores.sinks_H, scores.softcap)

    def _first_N(self, mask: PositionMask) -> Tensor:
        self._rules.append(mask.rule)
        position_N1, key_1W = self._due.position_N[:, None], torch.arange(self._window)[None]
        seen_NW = mask.rule(0, 0, position_N1, key_1W) & (key_1W <= position_N1)
        return self._due.position_N + 1 - seen_NW.sum(-1)


class _TracedProducts(TorchFunctionMode):
    """Replaces products with weights by `row_linear`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes one function of torch."""
        given = kwargs or {}
        if func is F.linear:
            return _linear(*args, **given)
        if func in _PRODUCTS and args[1].ndim == 2 and args[0].ndim >= 2:
            return _linear(args[0], args[1].t())
        return func(*args, **given)


_PRODUCTS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product_NO = row_linear(input.reshape(-1, input.shape[-1]), weight)
    product_NO = product_NO if bias is None else product_NO + bias
    return product_NO.view(*input.shape[:-1], weight.shape[0])
