"""The interface of a causal language model: learners, engines and checkpoints use the fast decoder and others alike."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentgym.model.packed_layout import PackedLayout
from agentgym.model.routing import Router
from agentgym.types import JSON

__all__ = ["ROUNDING", "KvShape", "LanguageModel", "LayerCost", "cap_logits", "logits_difference"]

# Shape suffixes: N packed tokens, M wanted entries, E model width, V vocabulary.

T = TypeVar("T")

ROUNDING, MEAN = 1e-3, 0.025
"""The largest difference of logprobs that rounding explains in float32, and the mean one in shorter types, in which a
few tokens may go to other experts; relative to their range, since in small random models all differences are small."""


class KvShape(NamedTuple):
    """The sizes of the keys and values that one attention layer keeps for each token."""

    num_heads: int
    width: int
    """The width of a head; of keys and values that differ, the larger one."""


class LayerCost(NamedTuple):
    """The multiplications in one layer, the mean of all layers; for the choice of rows that cost as much as others."""

    token: int
    """Those of a token with the weights."""
    pair: int
    """Those of a token with another one that it attends to."""

    @classmethod
    def estimate(cls, matrices: Iterable[Tensor], config: Any, width: int) -> LayerCost:
        """Counts the matrices of the layers of a model with this configuration of transformers.

        A token takes some of a stack of experts, and attends in every layer, with heads as wide as the model.
        """
        experts_per_token, weights = getattr(config, "num_experts_per_tok", None), 0
        for matrix in matrices:
            if matrix.ndim == 2:
                weights += matrix.numel()
            elif matrix.ndim == 3 and isinstance(experts_per_token, int):
                weights += matrix[0].numel() * min(experts_per_token, len(matrix))
        return cls(weights // int(config.num_hidden_layers), 2 * width)


class LanguageModel(nn.Module):
    """A causal language model over packed sequences; `Decoder` and `TransformersModel` implement it."""

    softcap: float | None = None
    """Logits are `softcap * tanh(raw / softcap)`; None for none."""
    packs = True
    """True if sequences may share a pass and their prefixes; otherwise each is computed alone or in a batch."""

    routers: tuple[Router, ...] = ()
    """The routers of a mixture of experts, in the order of the layers."""
    routers_are_frozen = False
    balance_coefficient = 0.0
    """The weight that the model's configuration gives to the load balancing loss of its experts."""

    vocab_size: int
    width: int
    context_window: int
    num_layers: int
    layer_cost: LayerCost
    embed: Tensor
    """The `[V, E]` embedding; its device and dtype are those of the model."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The `[V, E]` output matrix (the embedding itself if tied)."""

    @property
    @abstractmethod
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """The sizes of each attention layer's keys and values, in the order of the layers."""

    @property
    @abstractmethod
    def blocks(self) -> tuple[nn.Module, ...]:
        """The modules whose weights ranks gather at once, each alone; a block inside of another one is before it."""

    @abstractmethod
    def hidden_states(self, ids_N: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the final normalized states `[M, E]` of the wanted entries of packed sequences."""

    @abstractmethod
    def set_recompute(self, recomputes: bool) -> None:
        """Chooses whether the backward pass recomputes the inner states of each block instead of keeping them."""

    @property
    def num_parameters(self) -> int:
        """The number of all parameters; of a sharded model, of all ranks together."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_chosen(self) -> int:
        """Returns how many experts a router gives a token to; 0 if the routers do not choose by `topk`."""
        return 0

    def freeze_routers(self) -> None:
        """Keeps the weights of the routers as they are."""
        self.routers_are_frozen = True
        for router in self.routers:
            router.module.requires_grad_(False)

    @abstractmethod
    def to_hf(self) -> dict[str, JSON]:
        """Returns the `config.json` that `transformers` reads."""

    def forward(self, ids_N: Tensor, layout: PackedLayout, reader: Callable[[Tensor, Tensor], T]) -> T:
        """Returns `read(hidden_ME, head_weight)`, where `hidden_ME` are the final states.

        Sharded parameters are whole only during this call. `reader` then has to return tensors: one, or a tuple.
        """
        return reader(self.hidden_states(ids_N, layout), layout.exchange.whole_weight(self.head_weight))

    def like(self) -> Self:
        """Returns the same model, adapters included, with parameters on the meta device, which have no memory yet."""
        meta = {parameter: torch.empty_like(parameter, device="meta") for parameter in self.parameters()}
        memo: dict[int, object] = {
            id(own): nn.Parameter(new, requires_grad=own.requires_grad) for own, new in meta.items()
        }
        return copy.deepcopy(self, memo)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Returns logits `[N, V]`; for training, compute them in chunks, never for a whole batch."""
        return cap_logits(F.linear(hidden_NE, self.head_weight), self.softcap)


def logits_difference(ours_TV: Tensor, theirs_TV: Tensor, bound: float = ROUNDING) -> str:
    """Returns the largest difference of two sets of logprobs in nats, as text; "" if rounding explains it.

    The bound is that of float32, for the largest difference; of shorter types the mean one is looked at.
    """
    logp_TV = theirs_TV.float().log_softmax(-1)
    difference_TV, size = (ours_TV.float().log_softmax(-1) - logp_TV).abs(), logp_TV.max() - logp_TV.min()
    is_exact = ours_TV.dtype in (torch.float32, torch.float64)
    is_rounding = difference_TV.max() <= bound * size if is_exact else difference_TV.mean() <= MEAN * size
    return "" if is_rounding else f"{float(difference_TV.max()):.3g}"


def cap_logits(logits_NV: Tensor, softcap: float | None) -> Tensor:
    """Returns logits within `softcap` of 0, or the logits themselves for None."""
    return logits_NV if softcap is None else torch.tanh(logits_NV / softcap) * softcap
