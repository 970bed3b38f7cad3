"""Parameters and tensors that belong to them, whole or as the shard of one rank; files have whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Gather", "Stored", "is_sharded", "keep_rows", "like", "shard", "whole"]

Gather: TypeAlias = Callable[..., Tensor]
"""`whole` or `shard`: how a state has its tensors."""


def whole(tensor: Tensor, of: Tensor | None = None) -> Tensor:
    """Returns the tensor without a graph, gathered if it is sharded; then all ranks must call it for the same tensor.

    `of` is the parameter that the tensor belongs to, for example as its gradient; without it, the tensor is a parameter
    itself.
    """
    detached = tensor.detach()
    if not is_sharded(detached):
        return detached
    order, full = _kept_rows(tensor if of is None else of), detached.full_tensor()
    return full if order is None else torch.empty_like(full).index_copy_(0, order.to(full.device), full)


def shard(tensor: Tensor, of: Tensor | None = None) -> Tensor:
    """Returns the tensor as `whole` does, but as this rank's part if that is a part of the whole as files have it."""
    is_in_order = _kept_rows(tensor if of is None else of) is None
    return tensor.detach() if is_in_order else whole(tensor, of)


class Stored(Protocol):
    """A tensor in a file."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Returns the whole tensor, on the CPU."""

    def read_into(self, target: Tensor) -> Tensor:
        """Fills a tensor of the same shape, or this rank's part of it, and returns it."""


@torch.no_grad()
def like(tensor: Tensor | Stored, parameter: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, sharded as the parameter is; the tensor itself if the parameter is whole.

    Of a stored tensor only the shard is read.
    """
    order = _kept_rows(parameter)
    if not isinstance(tensor, Tensor):
        if is_sharded(parameter) and order is None:
            return tensor.read_into(torch.empty_like(parameter, dtype=tensor.dtype))
        tensor = tensor.read()
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # takes most of a second, and settings import this file

    mesh = parameter.device_mesh
    rows = tensor.to(mesh.device_type)
    rows = rows if order is None else rows[order.to(rows.device)]
    sharded = distribute_tensor(rows, mesh, parameter.placements, src_data_rank=None).to(parameter.device)
    # A part of the columns is a view with gaps, and fused optimizers need contiguous memory.
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(sharded)


def keep_rows(parameter: Tensor, order: Tensor) -> None:
    """Records that row `i` of a sharded parameter, and of tensors that belong to it, is row `order[i]` of the whole."""
    parameter.kept_rows = order  # type: ignore[attr-defined]


def _kept_rows(parameter: Tensor) -> Tensor | None:
    order: Tensor | None = getattr(parameter, "kept_rows", None)
    return order


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if this is a rank's part of a tensor that is sharded over all ranks."""
    return hasattr(tensor, "full_tensor")
