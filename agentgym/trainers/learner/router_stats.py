"""The statistics of the routers of a mixture of experts over one update, and the sums that they are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.model.routing import BatchRouting

__all__ = ["RouterStats", "RouterSums"]

# Shape suffixes: R routers, X experts, B rows.


@dataclass(frozen=True, kw_only=True)
class RouterStats:
    """The choices of experts for the tokens of an update, prompts included."""

    router_loss: float
    """The load balancing loss, without its weight, as a mean over rows weighted as in the loss: K for even loads."""
    router_entropy: float
    """The mean entropy of a router's distribution over the experts, in nats."""
    router_load_max: float
    """The load of the busiest expert of any layer, in multiples of an even load."""
    router_idle: float
    """The share of experts, over all layers, that no token was given to."""
    router_loads: tuple[tuple[float, ...], ...]
    """The share of each expert in the choices of its layer, by layer."""


@dataclass(frozen=True, eq=False)
class RouterSums:
    """The sums over one micro-batch, without gradients; those of two add up. No router has loads of shape `[0, 0]`."""

    loss: Tensor
    entropy: Tensor
    num_calls: Tensor
    loads_RX: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, routing: BatchRouting | None, weight_B: Tensor) -> RouterSums:
        """Returns the sums over the rows of a computed pass, whose losses are weighted by `weight_B`."""
        nothing = weight_B.new_zeros(())
        if routing is None:
            return cls(nothing, nothing, nothing, weight_B.new_zeros(0, 0))
        loss = (routing.balance_loss_B.detach() * weight_B).sum()
        num_calls = nothing + routing.num_calls
        return cls(loss, routing.entropy_R().sum(), num_calls, routing.loads_RX())

    def __add__(self, other: RouterSums) -> RouterSums:
        loads_RX = self.loads_RX + other.loads_RX
        return RouterSums(
            self.loss + other.loss, self.entropy + other.entropy, self.num_calls + other.num_calls, loads_RX
        )

    @property
    def nothing(self) -> RouterSums:
        """The sums of no row, of as many experts."""
        zero = torch.zeros_like(self.loss)
        return RouterSums(zero, zero, zero, torch.zeros_like(self.loads_RX))

    @property
    def scalars(self) -> list[Tensor]:
        """All sums, as processes exchange them; the number of routers is among them."""
        num_routers = self.loss.new_full((), len(self.loads_RX))
        return [self.loss, self.entropy, self.num_calls, num_routers, *self.loads_RX.flatten()]

    @classmethod
    def of_scalars(cls, scalars: Sequence[Tensor]) -> RouterSums:
        """Returns the sums that `scalars` was made of."""
        loss, entropy, num_calls, num_routers, *loads = scalars
        flat = torch.stack(loads) if loads else loss.new_zeros(0)
        return cls(loss, entropy, num_calls, flat.view(int(num_routers), -1) if loads else loss.new_zeros(0, 0))

    @property
    def result(self) -> RouterStats | None:
        """The statistics; None without routers."""
        if not self.loads_RX.numel():
            return None
        share_RX = F.normalize(self.loads_RX.double(), p=1, dim=1)
        return RouterStats(
            router_loss=float(self.loss),
            router_entropy=float(self.entropy) / max(1.0, float(self.num_calls)),
            router_load_max=float(share_RX.max()) * share_RX.shape[1],
            router_idle=float((share_RX == 0).double().mean()),
            router_loads=tuple(tuple(round(share, 4) for share in share_X.tolist()) for share_X in share_RX),
        )
