"""Parameters and what belongs to them, whole or as the shard of one rank: what stands in files is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded", "like", "whole"]


def whole(tensor: Tensor) -> Tensor:
    """The tensor without a graph, gathered from all ranks where it is sharded: they all ask for the same one."""
    detached = tensor.detach()
    return detached.full_tensor() if is_sharded(detached) else detached


@torch.no_grad()
def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, cut as the parameter is; the tensor itself where that is whole."""
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # takes most of a second, and settings import this file

    mesh = parameter.device_mesh
    sharded = distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return sharded.to(parameter.device)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this is a rank's part of a tensor that lies on all ranks."""
    return hasattr(tensor, "full_tensor")
