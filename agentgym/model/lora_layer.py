"""Low-rank adapters (LoRA, Hu et al. 2021): small matrices whose product is added to frozen weights.

A published projection `W [O, I]` with an adapter computes `x W^T + scale (x A^T) B^T`. Projections that share one
matrix of the decoder have separate adapters, as in published adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import torch
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.linear import linear

__all__ = ["AdaptedLinear", "Adapter", "LayerAdapters", "adapters_off", "add_adapters", "find_adapters"]

# Shape suffixes: N packed tokens, I inputs, O outputs, R rank.

ROUTERS = frozenset({"gate", "router", "classifier", "shared_expert_gate"})
"""The names of linear layers that choose experts; they have no adapter unless they are named."""

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
    """The two matrices of one projection; they add nothing while B is 0."""

    def __init__(self, num_outputs: int, num_inputs: int, rank: int) -> None:
        super().__init__()
        self.A_RI = nn.Parameter(torch.zeros(rank, num_inputs))
        self.B_OR = nn.Parameter(torch.zeros(num_outputs, rank))


class AdaptedLinear(nn.Module):
    """A linear layer of a transformers model with an adapter; it takes the layer's place in the model."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float) -> None:
        super().__init__()
        self.adapted_base = base
        self.adapter = Adapter(base.out_features, base.in_features, rank).to(base.weight.device, base.weight.dtype)
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        """The weight `[O, I]` under the adapter; models look at its dtype."""
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


@torch.no_grad()
def add_adapters(
    model: nn.Module, inside: Set[nn.Module], targets: Sequence[str] | None, *, rank: int, scale: float
) -> None:
    """Adds adapters to those linear layers of `inside` that have these names; None is all but the routers.

    Raises ConfigError if the model has none of them.
    """
    found = [pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear) and pair[1] in inside]
    for name, module in found:
        owner, _, own = name.rpartition(".")
        if own in targets if targets is not None else own not in ROUTERS:
            setattr(model.get_submodule(owner), own, AdaptedLinear(cast(nn.Linear, module), rank=rank, scale=scale))
    if not dict(find_adapters(model)):
        names = sorted({name.rpartition(".")[2] for name, _ in found})
        raise ConfigError(f"the model has no layer to adapt; its linear layers are {', '.join(names)}")


def find_adapters(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yields each linear layer of a model that has an adapter, by the layer's name."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module


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
        found = {name: adapter for name, adapter in self.named_adapters() if name in projections}
        if not found or not _are_on.get():
            return None
        first_KI = torch.cat([adapter.A_RI for adapter in found.values()])
        lows = (linear(x_NI, first_KI) * self.scale).split(self.rank, 1)
        parts = {name: linear(low_NR, found[name].B_OR) for name, low_NR in zip(found, lows, strict=True)}
        outputs = [parts[name] if name in parts else self._zeros(x_NI, name) for name in projections]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _zeros(self, x_NI: Tensor, name: str) -> Tensor:
        return x_NI.new_zeros(len(x_NI), self._shapes[name][0])
