"""Low-rank adapters (LoRA, Hu et al. 2021): small matrices whose product is added to frozen weights.

A published projection `W [O, I]` with an adapter computes `x W^T + scale (x A^T) B^T`. Projections that share one
matrix of the decoder have separate adapters, as in published adapters. Transformers keeps the experts of a layer in one
stack `[X, O, I]`; each of them has an adapter of its own, and the experts' own code multiplies with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.linear import linear
from agentgym.model.published_weights import projection_names

__all__ = [
    "AdaptedWeight",
    "Adapter",
    "LayerAdapters",
    "adapters_off",
    "add_adapters",
    "find_adapters",
    "join_adapters",
    "remove_adapters",
]

# Shape suffixes: N packed tokens, I inputs, O outputs, R rank, X experts.

ROUTERS = frozenset({"gate", "router", "classifier", "shared_expert_gate"})
"""The names of linear layers that choose experts; they have no adapter unless they are named."""

STACKED = frozenset({"JetMoeParallelExperts", "Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts"})
"""The classes of stacked experts that transformers computes in one way only, so that it does not mark them."""

CONV1D = "Conv1D"
"""The class of GPT-2's linear layers in transformers, whose weights are `[I, O]`."""

_are_on: ContextVar[bool] = ContextVar("adapters_are_on", default=True)


@contextmanager
def adapters_off() -> Iterator[None]:
    """Disables the adapters of all models inside the context, on this thread only."""
    token = _are_on.set(False)
    try:
        yield
    finally:
        _are_on.reset(token)


class Adapter(nn.Module):
    """The two matrices of one projection; they add nothing while B is 0.

    The adapter of a stack of experts has a stack of each: A is `[X, R, I]`, and B is `[X, O, R]`.
    """

    def __init__(self, num_outputs: int, num_inputs: int, rank: int, stack: Sequence[int] = ()) -> None:
        super().__init__()
        self.A_RI = nn.Parameter(torch.zeros(*stack, rank, num_inputs))
        self.B_OR = nn.Parameter(torch.zeros(*stack, num_outputs, rank))


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of a model with adapters: a matrix, or a stack of experts.

    The stack `[X, 2 I, E]` of gates and ups has two adapters, or one and None if the other projection has none.
    """

    name: str
    """The parameter's name in the model."""
    adapters: Mapping[str, Adapter | None]
    """The adapters by the published name of their projection, in the order of the outputs."""
    is_transposed: bool = False
    """True if the weight is `[..., I, O]`."""

    @property
    def is_stack(self) -> bool:
        """True for the weights of all experts of a layer."""
        return any(adapter is not None and adapter.A_RI.ndim == 3 for adapter in self.adapters.values())

    def factors(self, load: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> tuple[Tensor, Tensor]:
        """Returns the left and the right factor of what the adapters add to the weight, without their scale."""
        adapters = self.adapters.values()
        left, right = join_adapters([None if own is None else (load(own.A_RI), load(own.B_OR)) for own in adapters])
        return (right.mT, left.mT) if self.is_transposed else (left, right)

    def merge(self, weight: Tensor, scale: float, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the weight with its adapters merged in."""
        left, right = self.factors(convert)
        return (torch.addmm if weight.ndim == 2 else torch.baddbmm)(weight, left, right, alpha=scale)


class AdaptedLinear(nn.Module):
    """A linear layer of a transformers model with an adapter; it takes the layer's place in the model."""

    adapted_base: nn.Linear
    """The layer under the adapter, or GPT-2's `Conv1D`, which has the same members."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float) -> None:
        super().__init__()
        self.adapted_base = base
        self.is_transposed = type(base).__name__ == CONV1D
        outputs, inputs = self.weight.mT.shape if self.is_transposed else self.weight.shape
        self.adapter = Adapter(outputs, inputs, rank).to(self.weight.device, self.weight.dtype)
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        """The weight under the adapter, `[O, I]` or GPT-2's `[I, O]`; models look at its dtype."""
        return self.adapted_base.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the linear layer, which some models read."""
        bias: Tensor | None = self.adapted_base.bias
        return bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output plus what the adapter adds to it, `[..., O]` for `[..., I]`."""
        base: Tensor = self.adapted_base(x)
        if not _are_on.get():
            return base
        flat_NI = x.reshape(-1, x.shape[-1])
        return base + linear(linear(flat_NI, self.adapter.A_RI) * self.scale, self.adapter.B_OR).view(base.shape)


def join_adapters(pairs: Sequence[tuple[Tensor, Tensor] | None]) -> tuple[Tensor, Tensor]:
    """Returns B and A of one adapter for projections that share a weight: `[..., O, K R]` and `[..., K R, I]`.

    `pairs` are A and B of each projection, or None if it has no adapter; K of them have one.
    """
    lefts, rights = [], []
    for index, pair in enumerate(pairs):
        if pair is not None:
            low_RI, high_OR = pair
            size = high_OR.shape[-2]
            lefts.append(F.pad(high_OR, (0, 0, index * size, (len(pairs) - 1 - index) * size)))
            rights.append(low_RI)
    return torch.cat(lefts, -1), torch.cat(rights, -2)


class LowRankSum:
    """The sum `weight + left @ right`, of matrices or stacks, in products, which do not compute the sum itself."""

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        self.weight, self.left, self.right = weight, left, right
        self._experts: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The weight's."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """The weight's."""
        return self.weight.device

    @property
    def shape(self) -> torch.Size:
        """The weight's."""
        return self.weight.shape

    def data_ptr(self) -> int:
        """Returns the address of the weight, which kernels want aligned."""
        return self.weight.data_ptr()

    def __getitem__(self, index: Tensor | int) -> LowRankSum:
        """Returns the sum of an expert, or of those in `index [N]`."""
        if isinstance(index, Tensor) and index.ndim:
            return LowRankSum(self.weight[index], self.left[index], self.right[index])
        if self._experts is None:  # the gradients of all experts are then put together once
            self._experts = self.left.unbind(), self.right.unbind()
        lefts, rights = self._experts
        return LowRankSum(self.weight[index], lefts[int(index)], rights[int(index)])

    def transpose(self, first: int, second: int) -> LowRankSum:
        """Returns the sum of the transposed matrices; the dimensions are the last two."""
        return LowRankSum(
            self.weight.transpose(first, second),
            self.right.transpose(first, second),
            self.left.transpose(first, second),
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes a product; raises ConfigError for another function of torch."""
        product = _PRODUCTS.get(func)
        if product is None:
            raise ConfigError(f"experts that call {func} have no adapters: leave them out of lora.target_modules")
        return product(func, *args, **(kwargs or {}))


def _linear(func: Callable[..., Tensor], x: Tensor, weight: LowRankSum, bias: Tensor | None = None) -> Tensor:
    return func(x, weight.weight, bias) + func(func(x, weight.right), weight.left)


def _matmul(func: Callable[..., Tensor], first: Tensor | LowRankSum, second: Tensor | LowRankSum) -> Tensor:
    if isinstance(second, LowRankSum):
        return func(first, second.weight) + func(func(first, second.left), second.right)
    assert isinstance(first, LowRankSum)
    return func(first.weight, second) + func(first.left, func(first.right, second))


def _grouped_mm(func: Callable[..., Tensor], x: Tensor, weight: LowRankSum, **options: Any) -> Tensor:
    missing = -weight.left.shape[-1] % 8  # rows of 16 bytes are what the kernel takes
    left, right = F.pad(weight.left, (0, missing)), F.pad(weight.right, (0, 0, 0, missing))
    return func(x, weight.weight, **options) + func(func(x, left, **options), right, **options)


_PRODUCTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.bmm: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.matmul: _matmul,
    torch._grouped_mm: _grouped_mm,  # which `F.grouped_mm` calls
}

_sums: ContextVar[Mapping[str, LowRankSum] | None] = ContextVar("sums", default=None)
"""The weights with adapters of the experts that this thread computes, by the name of their parameter."""


class AdaptedExperts(nn.Module):
    """A module of stacked experts with adapters; it has the class of the experts as a further base.

    The forward method of that class finds sums in place of its weights. Everything else finds the weights.
    """

    adapter: nn.ModuleDict
    """The adapters by the published name of their projection."""
    projections: Mapping[str, Sequence[str]]
    """The published names of the projections in each parameter with adapters."""
    scale: float

    def __getattr__(self, name: str) -> Any:
        """Returns a parameter or a module, or the sum in place of the weight."""
        sums = _sums.get()
        return sums[name] if sums is not None and name in sums else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the experts compute, with their adapters if these are on."""
        if not _are_on.get():
            return super().forward(*args, **kwargs)
        sums = {}
        for weight in self.adapted_weights(""):
            left, right = weight.factors()
            sums[weight.name] = LowRankSum(getattr(self, weight.name), left * self.scale, right)
        token = _sums.set(sums)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _sums.reset(token)

    def adapted_weights(self, prefix: str) -> Iterator[AdaptedWeight]:
        """Yields each parameter with adapters; the prefix is that of the module's names."""
        adapters_by_name = dict(self.adapter.items())
        for parameter, names in self.projections.items():
            adapters = {f"{prefix}{name}": cast("Adapter | None", adapters_by_name.get(name)) for name in names}
            yield AdaptedWeight(f"{prefix}{parameter}", adapters, bool(getattr(self, "is_transposed", False)))


def _adapt_experts(module: nn.Module, projections: Mapping[str, Sequence[str]], targets: Set[str], rank: int) -> None:
    """Adds adapters to a module of experts, those of the wanted projections."""
    adapter, adapted = nn.ModuleDict(), {}
    for parameter, names in projections.items():
        if not targets & set(names):
            continue
        weight = module.get_parameter(parameter)
        num_experts, outputs, inputs = weight.mT.shape if getattr(module, "is_transposed", False) else weight.shape
        for name in names:
            if name in targets:
                own = Adapter(outputs // len(names), inputs, rank, (num_experts,))
                adapter[name] = own.to(weight.device, weight.dtype)
        adapted[parameter] = names
    if adapted:
        module.__class__ = type(f"Adapted{type(module).__name__}", (AdaptedExperts, type(module)), {})
        module.adapter, module.projections = adapter, adapted  # type: ignore[assignment]


@torch.no_grad()
def add_adapters(
    model: nn.Module, inside: Set[nn.Module], targets: Sequence[str] | None, *, rank: int, scale: float
) -> None:
    """Adds adapters to those linear layers and experts of `inside` that have these published names.

    None is all but the routers. Raises ConfigError for a name that no layer has, or if there is nothing to adapt.
    """
    modules = [pair for pair in model.named_modules() if pair[1] in inside]
    layers = [(name, module) for name, module in modules if _is_linear(module)]
    experts = [(module, _stacked_projections(model, name, module)) for name, module in modules]
    layer_names = {name.rpartition(".")[2] for name, _ in layers}
    layer_names |= {name for _, projections in experts for names in projections.values() for name in names}
    target_names = layer_names - ROUTERS if targets is None else set(targets)
    if not target_names or not target_names <= layer_names:
        missing = f" that is called {' or '.join(sorted(target_names - layer_names))}" if target_names else ""
        raise ConfigError(f"the model has no layer to adapt{missing}; its layers are {', '.join(sorted(layer_names))}")
    for name, layer in layers:
        owner, _, own = name.rpartition(".")
        if own in target_names:
            setattr(model.get_submodule(owner), own, AdaptedLinear(layer, rank=rank, scale=scale))
    for module, projections in experts:
        _adapt_experts(module, projections, target_names, rank)
        if isinstance(module, AdaptedExperts):
            module.scale = scale


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) or type(module).__name__ == CONV1D


def _stacked_projections(model: nn.Module, name: str, module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the published projections in each stack of a module's experts; of most modules none."""
    if not (hasattr(module, "is_transposed") or type(module).__name__ in STACKED):
        return {}
    stacks = {own: weight for own, weight in module.named_parameters(recurse=False) if weight.ndim == 3}
    return {own: projection_names(model, f"{name}.{own}", weight) for own, weight in stacks.items()}


def find_adapters(model: nn.Module) -> Iterator[AdaptedWeight]:
    """Yields each weight of a model that has adapters."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield AdaptedWeight(f"{name}.weight", {name: module.adapter}, module.is_transposed)
        elif isinstance(module, AdaptedExperts):
            yield from module.adapted_weights(f"{name}.")


def remove_adapters(model: nn.Module) -> None:
    """Puts the linear layers and experts back in place of those with adapters."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, module.adapted_base)
        elif isinstance(module, AdaptedExperts):
            del module.adapter, module.projections, module.scale
            module.__class__ = type(module).__bases__[1]


class LayerAdapters(nn.Module):
    """The adapters of one decoder layer, by published projection.

    `shapes` are the outputs and inputs of all projections of the layer, `adapted` those that have an adapter.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, int]], adapted: Sequence[str], *, rank: int, scale: float
    ) -> None:
        super().__init__()
        self.rank, self.scale = rank, scale
        self._shapes = dict(shapes)
        self._adapters = nn.ModuleDict({name: Adapter(*shapes[name], rank) for name in shapes if name in adapted})

    def named_adapters(self) -> Iterator[tuple[str, Adapter]]:
        """Yields each adapter with the name of its projection."""
        for name, adapter in self._adapters.items():
            assert isinstance(adapter, Adapter)
            yield name, adapter

    def forward(self, x_NI: Tensor, *projections: str) -> Tensor | None:
        """Returns what is added to these projections' outputs of `x_NI`, concatenated `[N, O]`; None for nothing."""
        adapters = {name: adapter for name, adapter in self.named_adapters() if name in projections}
        if not adapters or not _are_on.get():
            return None
        first_KI = torch.cat([adapter.A_RI for adapter in adapters.values()])
        lows = (linear(x_NI, first_KI) * self.scale).split(self.rank, 1)
        parts = {name: linear(low_NR, adapters[name].B_OR) for name, low_NR in zip(adapters, lows, strict=True)}
        outputs = [parts[name] if name in parts else self._zeros(x_NI, name) for name in projections]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _zeros(self, x_NI: Tensor, name: str) -> Tensor:
        return x_NI.new_zeros(len(x_NI), self._shapes[name][0])
