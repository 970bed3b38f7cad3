"""The experts that a mixture gives each token to: read during a pass, or taken from an earlier one.

Every router of transformers names itself to it (`_can_record_outputs`) and returns its logits, and the last `topk` that
it calls chooses the experts. So one wrapper around its forward method serves all architectures. To compute a token with
the experts that sampled it is the router replay (R3) of Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentgym.errors import InvalidTrajectory

__all__ = [
    "BatchRouting",
    "PassRouting",
    "Router",
    "current_routing",
    "experts_of_routers",
    "find_routers",
    "route_pass",
    "routing_of",
]

# Shape suffixes: R routers, P tokens of a pass, N entries of packed rows, B rows, K chosen experts, X experts.

FREE = -1
"""The number in place of an expert where the router chooses by itself."""
_TOPK = (torch.topk, torch.Tensor.topk)


class PassRouting:
    """The choices of experts in one pass; with `replay_RPK`, those that are made."""

    def __init__(self, replay_RPK: Tensor | None = None) -> None:
        self.replay_RPK = replay_RPK
        self.logits: dict[int, Tensor] = {}
        """The logits `[P, X]` of each router, by its number."""
        self.chosen: dict[int, Tensor] = {}
        """The chosen experts `[P, K]`."""

    def num_chosen(self, number: int) -> int:
        """Returns how many experts a router chooses for a token; 1 if that is not known."""
        return self.chosen[number].shape[1] if number in self.chosen else 1

    @property
    def chosen_PRK(self) -> Tensor:
        """The experts of every token, by router."""
        return torch.stack([self.chosen[number] for number in sorted(self.chosen)], 1)


_routing: ContextVar[PassRouting | None] = ContextVar("routing", default=None)


def current_routing() -> PassRouting | None:
    """Returns the routing of the pass that this thread computes; None if nobody asks for it."""
    return _routing.get()


@contextmanager
def routing_of(routing: PassRouting | None) -> Iterator[None]:
    """Makes passes inside the context note their choices of experts, or follow those of the routing."""
    token = _routing.set(routing)
    try:
        yield
    finally:
        _routing.reset(token)


class Router:
    """A router of a model: its module, whose forward method is wrapped."""

    def __init__(self, name: str, module: nn.Module, number: int, logits_index: int) -> None:
        self.module, self.number, self.logits_index = module, number, logits_index
        self.layer = next((int(word) for word in name.split(".") if word.isdecimal()), number)
        self.num_topk: int | None = None
        """The number of its calls of `topk`, of which the last chooses the experts; None before its first pass."""
        vars(module)["forward"] = partial(_route, type(module).forward, self)

    @property
    def replays(self) -> bool:
        """True if its choice can be made for it."""
        return self.num_topk != 0


def find_routers(backbone: nn.Module) -> tuple[Router, ...]:
    """Wraps the routers of a model, and returns them in the order of its layers."""
    recorded = getattr(backbone, "_can_record_outputs", None) or {}
    outputs = recorded.get("router_logits", ())
    index_of = {
        getattr(output, "target_class", output): getattr(output, "index", 0)
        for output in (outputs if isinstance(outputs, list | tuple) else (outputs,))
    }
    names = {module: name for name, module in backbone.named_modules() if type(module) in index_of}
    inner = [module for module in names if not any(part in names for part in list(module.modules())[1:])]
    return tuple(Router(names[module], module, number, index_of[type(module)]) for number, module in enumerate(inner))


def experts_of_routers(routers: Sequence[Router], experts_NRK: Tensor) -> Tensor:
    """Returns the experts `[N, R, K]` of each router from a record of them, or of all layers with and without one.

    Raises InvalidTrajectory for a record of another model.
    """
    num_recorded, layers = experts_NRK.shape[1], [router.layer for router in routers]
    if num_recorded == len(routers):
        return experts_NRK
    if num_recorded <= max(layers):
        raise InvalidTrajectory(
            f"experts of {num_recorded} layers are recorded, and the model has {len(routers)} routers"
        )
    return experts_NRK[:, layers]


def _route(forward: Callable[..., Any], router: Router, *args: Any, **kwargs: Any) -> Any:
    """Computes a router; notes its choice for the pass, or makes the pass's choice."""
    routing = _routing.get()
    if routing is None and router.num_topk is not None:
        return forward(router.module, *args, **kwargs)
    replay_PK = None if routing is None or routing.replay_RPK is None else routing.replay_RPK[router.number]
    with _LastTopk(replay_PK, router.num_topk) as choice:
        outputs = forward(router.module, *args, **kwargs)
    router.num_topk = choice.num_calls
    if routing is not None and router.number not in routing.logits:  # blocks may be computed again
        routing.logits[router.number] = outputs[router.logits_index].flatten(0, -2)
        if choice.chosen is not None:
            routing.chosen[router.number] = choice.chosen.flatten(0, -2)
    return outputs


class _LastTopk(TorchFunctionMode):
    """Notes the indices of the last `topk`, or replaces them."""

    def __init__(self, replay_PK: Tensor | None, last: int | None) -> None:
        super().__init__()
        self.num_calls = 0
        self.chosen: Tensor | None = None
        self._replay_PK, self._last = replay_PK, last

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes one function of torch."""
        output = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.num_calls += 1
            if self._replay_PK is not None and self.num_calls == self._last:
                scores = args[0] if args else (kwargs or {})["input"]
                replay = self._replay_PK.to(output[1]).view_as(output[1])
                index = torch.where(replay == FREE, output[1], replay)
                output = torch.return_types.topk((scores.gather(-1, index), index))
            self.chosen = output[1]
        return output


class BatchRouting:
    """The choices of experts for the entries of packed rows of `seqlens` entries, over all passes that compute them.

    `experts_NRK` are the choices to make, `FREE` where the routers choose; None if they choose everywhere.
    """

    def __init__(self, seqlens: Sequence[int], experts_NRK: Tensor | None = None) -> None:
        self._seqlens, self._experts_NRK = tuple(seqlens), experts_NRK
        self._passes: list[tuple[PassRouting, Tensor, Tensor]] = []

    def begin_pass(self, entry_N: Tensor, place_N: Tensor, num_tokens: int) -> PassRouting:
        """Returns the routing of a pass of `num_tokens` tokens, in which `place_N[i]` is the entry `entry_N[i]`."""
        replay_RPK = None
        if self._experts_NRK is not None:
            experts_NRK = self._experts_NRK[entry_N]
            replay_RPK = experts_NRK.new_full((num_tokens, *experts_NRK.shape[1:]), FREE)
            replay_RPK[place_N] = experts_NRK
            replay_RPK = replay_RPK.transpose(0, 1)
        routing = PassRouting(replay_RPK)
        self._passes.append((routing, entry_N, place_N))
        return routing

    @cached_property
    def balance_loss_B(self) -> Tensor:
        """The load balancing loss of each row, `[B]`, as transformers computes it of a row on its own.

        It is that of equations 4 to 6 of Fedus et al. 2021 (Switch Transformer) over the tokens of all layers.
        """
        losses = [self._pass_losses_B(*parts) for parts in self._passes]
        return torch.stack(losses).sum(0) if losses else torch.zeros(len(self._seqlens))

    def _pass_losses_B(self, routing: PassRouting, entry_N: Tensor, place_N: Tensor) -> Tensor:
        """Returns the losses of the rows that one pass computes, 0 for the others."""
        num_rows = len(self._seqlens)
        row_N = torch.repeat_interleave(torch.tensor(self._seqlens)).to(entry_N.device)[entry_N]
        num_B = (torch.bincount(row_N, minlength=num_rows) * len(routing.logits)).clamp(min=1)
        probs_BX, counts_BX = [], []
        for number, logits_PX in routing.logits.items():
            probs_NX = logits_PX.float().softmax(-1)[place_N]
            chosen_NK = probs_NX.topk(routing.num_chosen(number), -1)[1]
            zeros_BX = probs_NX.new_zeros(num_rows, probs_NX.shape[1])
            probs_BX.append(zeros_BX.index_add(0, row_N, probs_NX))
            counts_BX.append(zeros_BX.index_add(0, row_N, torch.zeros_like(probs_NX).scatter_(1, chosen_NK, 1.0)))
        products_BX = torch.stack(probs_BX).sum(0) * torch.stack(counts_BX).sum(0)
        return products_BX.shape[1] * products_BX.sum(1) / num_B.square()

    @property
    def num_calls(self) -> int:
        """The number of entries times that of routers whose choices are known."""
        return sum(len(routing.chosen) * len(place_N) for routing, _, place_N in self._passes)

    @torch.no_grad()
    def loads_RX(self) -> Tensor:
        """Returns how many entries each router gives to each expert, int64."""
        loads_RX = self._sum_routers(_count_choices)
        return loads_RX if loads_RX.ndim == 2 else loads_RX.view(0, 0)

    @torch.no_grad()
    def entropy_R(self) -> Tensor:
        """Returns the sum of the entropies of each router's distributions over the entries, in nats."""
        return self._sum_routers(lambda logits_NX, _: torch.special.entr(logits_NX.float().softmax(-1)).sum())

    def chosen_NRK(self) -> Tensor:
        """Returns the experts that each router gave the entries to."""
        parts = [(entry_N, routing.chosen_PRK[place_N]) for routing, entry_N, place_N in self._passes]
        return torch.cat([chosen_NRK for _, chosen_NRK in parts])[
            torch.cat([entry_N for entry_N, _ in parts]).argsort()
        ]

    def _sum_routers(self, read_router: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sums: dict[int, Tensor] = {}
        for routing, _, place_N in self._passes:
            for number, chosen_PK in routing.chosen.items():
                router_sums = read_router(routing.logits[number][place_N], chosen_PK[place_N])
                sums[number] = sums[number] + router_sums if number in sums else router_sums
        return torch.stack([sums[number] for number in sorted(sums)]) if sums else torch.zeros(0)


def _count_choices(logits_NX: Tensor, chosen_NK: Tensor) -> Tensor:
    return torch.bincount(chosen_NK.flatten(), minlength=logits_NX.shape[1])


@contextmanager
def route_pass(routing: BatchRouting | None, entry_N: Tensor, place_N: Tensor, num_tokens: int) -> Iterator[None]:
    """Routes the pass inside the context as `BatchRouting.begin_pass` says; without a routing, nothing is noted."""
    with routing_of(None if routing is None else routing.begin_pass(entry_N, place_N, num_tokens)):
        yield
