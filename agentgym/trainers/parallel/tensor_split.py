"""Splits the weights of a module over tensor parallel ranks, as DTensors that `fully_shard` shards further.

Queries, keys and values are one matrix, and so are gate and up: a rank's part must hold its heads of each. So the rows
of sharded tensors are in another order (`sharded_tensor.keep_rows`), and those of whole tensors in the published one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from agentgym.model.decoder import Decoder, DecoderLayer
from agentgym.trainers.parallel.sharded_tensor import is_sharded, keep_rows

__all__ = ["mark_rows", "second_cut", "split_weights"]

SPLITS = {"qkv": 0, "qkv_bias": 0, "gate_up": 0, "out": 1, "down": 1, "embed": 1, "head": 1}
"""The dimension in which each parameter is split; all others are the same on every rank."""


@torch.no_grad()
def split_weights(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces each parameter, which all ranks have whole, by a DTensor of which this rank keeps its part."""
    for part in module.modules():
        orders = row_orders(part, mesh.size())
        for name, parameter in list(part.named_parameters(recurse=False)):
            order = orders.get(name)
            source = parameter if order is None else parameter[order.to(parameter.device)]
            dimension = SPLITS.get(name) if isinstance(part, Decoder | DecoderLayer) else None
            placement: Placement = Replicate() if dimension is None else Shard(dimension)
            sharded = distribute_tensor(source.detach(), mesh, [placement], src_data_rank=None)
            setattr(part, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def mark_rows(module: nn.Module, num_parts: int) -> None:
    """Records the order of their rows at the parameters; must be repeated when other tensors replace them."""
    if num_parts == 1:
        return
    for part in module.modules():
        for name, order in row_orders(part, num_parts).items():
            keep_rows(getattr(part, name), order)


def second_cut(num_shards: int, parameter: nn.Parameter) -> Shard | None:
    """The dimension in which `fully_shard` shards a parameter further; None is its default, the first.

    It differs from that of the ranks' parts if there is another, since a tensor that is split twice in one dimension is
    costly to gather, and has equal shards.
    """
    if not (is_sharded(parameter) and parameter.ndim > 1 and parameter.placements[0].is_shard(0)):
        return None
    return Shard(next((index for index, size in enumerate(parameter.shape) if index and size % num_shards == 0), 1))


def row_orders(module: nn.Module, num_parts: int) -> dict[str, Tensor]:
    """The order of the rows of each parameter that consists of several matrices, as they are stored."""
    if not isinstance(module, DecoderLayer):
        return {}
    heads = _order([module.q_width, module.kv_width, module.kv_width], num_parts)
    units = _order([module.config.ffn_width] * 2, num_parts)
    return {"qkv": heads, "gate_up": units} | ({} if module.qkv_bias is None else {"qkv_bias": heads})


def _order(sizes: Sequence[int], num_parts: int) -> Tensor:
    """The order of the rows of stacked matrices of these sizes: the first part of each, then the second of each..."""
    index = torch.arange(sum(sizes))
    chunks = [index[start:stop].chunk(num_parts) for start, stop in pairwise([0, *accumulate(sizes)])]
    return torch.cat([chunk for part in zip(*chunks, strict=True) for chunk in part])
