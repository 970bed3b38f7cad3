"""Divides the experts of a mixture over the ranks of a block, which send each other the tokens of their experts.

This is expert parallelism (GShard, Lepikhin et al. 2020) over ranks that take rows of their own. A token is sent once
to each rank that has any of its experts, and comes back as the weighted sum of what these computed, as in DeepEP. The
stacks of a layer are DTensors split over the block, which `fully_shard` shards further over the ranks of other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from agentgym.model.lora_layer import Adapter
from agentgym.trainers.parallel.sharded_tensor import is_sharded

__all__ = ["expert_stacks", "find_experts", "split_experts"]

# Shape suffixes: N tokens of this rank, K experts of a token, R ranks of the block, E model width; S tokens to send,
# once for each rank; M received ones; T pairs of a received token and one of this rank's experts.


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of stacked experts that can be divided: those that transformers computes in several ways.

    These take states, the experts of each token and their weights, and each of their stacks has a part for each expert.
    """
    marked = [module for module in model.modules() if hasattr(module, "is_transposed") and _num_experts(module)]
    return [module for module in marked if all(len(stack) == _num_experts(module) for stack in expert_stacks(module))]


def expert_stacks(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a module of experts that have a part for each expert, those of adapters included."""
    return [stack for _, _, stack in _named_stacks(module)]


@torch.no_grad()
def split_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divides the experts of a model, which all ranks have whole, over the ranks of a mesh; returns their modules.

    Each stack becomes a DTensor of which this rank keeps its part. All ranks must compute the modules together. Experts
    that do not divide, such as those of a teacher, stay whole.
    """
    modules = [module for module in find_experts(model) if _num_experts(module) % mesh.size() == 0]
    for module in modules:
        for part, name, stack in list(_named_stacks(module)):
            own = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(part, name, nn.Parameter(own, requires_grad=stack.requires_grad))
        vars(module)["num_experts"] = _num_experts(module) // mesh.size()
        vars(module)["forward"] = partial(_compute_everywhere, type(module).forward, module, mesh.get_group())
    return modules


def _num_experts(module: nn.Module) -> int:
    """Returns the number of experts of a module; of divided ones, those of this rank."""
    return int(vars(module).get("num_experts", 0))


def _named_stacks(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in module.modules():
        if part is module or isinstance(part, Adapter):
            yield from ((part, name, stack) for name, stack in part.named_parameters(recurse=False))


def _compute_everywhere(
    compute: Callable[..., Tensor],
    module: nn.Module,
    group: dist.ProcessGroup,
    x_NE: Tensor,
    index_NK: Tensor,
    weight_NK: Tensor,
) -> Tensor:
    """Returns the weighted sum of each token's experts, `[N, E]`, wherever these are."""
    num_own = _num_experts(module)
    is_wanted_NR = index_NK.new_zeros(len(index_NK), group.size() + 1, dtype=torch.bool)
    is_wanted_NR.scatter_(1, index_NK // num_own, True)  # an index of no expert counts for a rank that is none
    rank_S, token_S = is_wanted_NR[:, :-1].T.nonzero(as_tuple=True)
    trip = _Trip(group, torch.bincount(rank_S, minlength=group.size()))
    x_ME, weight_MK = trip.send(x_NE[token_S]), trip.send(weight_NK[token_S])
    index_MK = trip.send(index_NK[token_S]) - group.rank() * num_own
    if not len(x_ME):  # an expert computes a token of weight 0, so that backward passes need the same messages
        x_ME, weight_MK, index_MK = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (x_ME, weight_MK, index_MK))
    row_T, slot_T = ((index_MK >= 0) & (index_MK < num_own)).nonzero(as_tuple=True)
    with _own_experts(module):
        out_TE = compute(module, x_ME[row_T], index_MK[row_T, slot_T, None], weight_MK[row_T, slot_T, None])
    return _sum_rows(trip.send_back(_sum_rows(out_TE, row_T, len(x_ME))), token_S, len(x_NE))


def _sum_rows(rows_SE: Tensor, index_S: Tensor, number: int) -> Tensor:
    """Returns `number` rows, each the sum of those with its index; unlike `index_add`, it keeps no rows."""
    zeros = rows_SE.new_zeros(number, rows_SE.shape[1])
    return zeros.scatter_add(0, index_S[:, None].expand_as(rows_SE), rows_SE)


class _Trip:
    """The way of rows to the ranks of a group and back: the first `num_sent_R[0]` go to rank 0, and so on."""

    def __init__(self, group: dist.ProcessGroup, num_sent_R: Tensor) -> None:
        self._group, num_received_R = group, torch.empty_like(num_sent_R)
        dist.all_to_all_single(num_received_R, num_sent_R, group=group)
        self._num_out, self._num_in = torch.stack([num_sent_R, num_received_R]).tolist()

    def send(self, rows: Tensor) -> Tensor:
        """Returns the rows that the ranks send here, those of rank 0 first."""
        result: Tensor = _Exchange.apply(rows, self._num_out, self._num_in, self._group)  # type: ignore[no-untyped-call]
        return result

    def send_back(self, rows: Tensor) -> Tensor:
        """Returns what the ranks send for the rows that they got from here, given that for the rows from there."""
        own = rows[: sum(self._num_in)]
        result: Tensor = _Exchange.apply(own, self._num_in, self._num_out, self._group)  # type: ignore[no-untyped-call]
        return result


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = received, num_sent, group
        return _swap_rows(rows, num_sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap_rows(grads[0], *ctx.way_back), None, None, None


def _swap_rows(rows: Tensor, num_sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    received_rows = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(received_rows, rows.contiguous(), received, num_sent, group=group)
    return received_rows


@contextmanager
def _own_experts(module: nn.Module) -> Iterator[None]:
    """Has the module's code find this rank's experts in place of the stacks that are divided."""
    stacks = list(_named_stacks(module))
    for part, name, stack in stacks:
        vars(part)["_parameters"][name] = stack.to_local() if is_sharded(stack) else stack
    try:
        yield
    finally:
        for part, name, stack in stacks:
            vars(part)["_parameters"][name] = stack
