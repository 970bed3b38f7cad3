"""The collectives of the ranks of a block in a forward pass that they share.

Sequence parallel is DeepSpeed-Ulysses (Jacobs et al. 2023): an all-to-all before attention turns a portion of the
tokens with all heads into all tokens with a portion of the heads, and one after it turns that back. Tensor parallel is
Megatron's (Shoeybi et al. 2019, with the tokens split wherever weights are not, Korthikanti et al. 2022): tokens are
gathered for a product with a part of the outputs, and the results of products with a part of the inputs are summed and
scattered again. Each collective is a differentiable one of torch.

Difference from Ulysses: key/value heads that the ranks do not divide are repeated as often as needed, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from agentgym.model.exchange import Exchange
from agentgym.trainers.parallel.mesh import RankMesh
from agentgym.trainers.parallel.sharded_tensor import is_sharded

__all__ = ["BlockExchange", "PassExchange", "Slots"]

# Shape suffixes as in `Exchange`, and: S slots of all ranks of the block, R ranks of the sequence, X heads a rank.


@dataclass(frozen=True, eq=False)
class Slots:
    """The slot of each token, in their order; the `number` slots are those of the block's ranks, one after another."""

    place_U: Tensor
    number: int


class PassExchange(Exchange):
    """The exchange of ranks that run their own passes: all run equally many, because each pass gathers weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def max_over_ranks(self, number: int) -> int:
        """The largest of the numbers of all ranks."""
        maximum = torch.tensor(number, device=self._device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return int(maximum)


class BlockExchange(Exchange):
    """The collectives of one pass; every rank of the block calls the same ones, forward and backward.

    `every` are the slots of all tokens. `queries` are those of the wanted tokens, where the last layer computes no
    others. `owner_M` is the rank of the block that has each wanted entry.
    """

    def __init__(self, mesh: RankMesh, every: Slots, queries: Slots, owner_M: Tensor) -> None:
        config = mesh.config
        self.num_parts = config.tensor
        self._num_ranks = config.sequence
        self._block, self._sequence, self._tensor = mesh.block, mesh.sequence, mesh.weights["tensor"]
        self._every, self._queries = every, queries
        self._owner_M = owner_M
        self._own_O = (owner_M == mesh.block_rank).nonzero()[:, 0]
        self._max_entries = int(owner_M.bincount(minlength=1).max())

    def weight(self, parameter: Tensor) -> Tensor:
        """This rank's part of a matrix, or the whole of an unsplit parameter, whose gradient is a sum over tokens."""
        if not is_sharded(parameter):
            return parameter
        gradient = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
        local: Tensor = parameter.to_local(grad_placements=gradient)
        return local

    def whole_weight(self, parameter: Tensor) -> Tensor:
        """The whole parameter, gathered from the ranks that split it."""
        if not is_sharded(parameter):
            return parameter
        whole: Tensor = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole

    def embed_ids(self, ids_N: Tensor, embed_VE: Tensor) -> Tensor:
        """The embeddings of this rank's tokens; each rank looks up its part of the width for the tokens of all."""
        if not is_sharded(embed_VE):
            return F.embedding(ids_N, embed_VE)
        part_NE = F.embedding(ids_N, embed_VE.to_local())
        return (
            _swap_ranks(part_NE.unflatten(0, (self.num_parts, -1)), self._tensor.get_group()).transpose(0, 1).flatten(1)
        )

    def gather_tokens(self, x_PE: Tensor) -> Tensor:
        """Gathers the tokens of the ranks that split the weights."""
        return self._among_tensor(x_PE, Shard(0), Replicate())

    def sum_parts(self, x_NE: Tensor) -> Tensor:
        """Sums over the ranks that split the weights; each keeps its own tokens."""
        return self._among_tensor(x_NE, Partial(), Shard(0))

    def to_heads(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, cuts: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens, for this rank's heads."""
        repeats = self._num_ranks // gcd(k_NKD.shape[1], self._num_ranks)
        if repeats > 1:
            k_NKD, v_NKD = k_NKD.repeat_interleave(repeats, 1), v_NKD.repeat_interleave(repeats, 1)
        if cuts:
            (q_WHD,) = self._tokens_of_heads([q_NHD], self._queries)
            k_UKD, v_UKD = self._tokens_of_heads([k_NKD, v_NKD], self._every)
            return q_WHD, k_UKD, v_UKD
        q_UHD, k_UKD, v_UKD = self._tokens_of_heads([q_NHD, k_NKD, v_NKD], self._every)
        return q_UHD, k_UKD, v_UKD

    def to_tokens(self, x_UHD: Tensor, cuts: bool) -> Tensor:
        """Numbers of all heads, for this rank's tokens."""
        slots = self._queries if cuts else self._every
        x_SHD = x_UHD.new_zeros(slots.number, *x_UHD.shape[1:]).index_copy(0, slots.place_U, x_UHD)
        x_RNXD = x_SHD.unflatten(0, (self._num_ranks, -1))
        return _swap_ranks(x_RNXD, self._sequence).transpose(0, 1).flatten(1, 2)

    def own(self, x_M: Tensor) -> Tensor:
        """The numbers of this rank's entries."""
        return x_M[self._own_O]

    def gather_entries(self, x_O: Tensor) -> Tensor:
        """Gathers all entries: this rank's own with their graph, and the others without."""
        padded = F.pad(x_O.detach(), (0, self._max_entries - len(x_O)))
        blocks = [torch.empty_like(padded) for _ in range(dist.get_world_size(self._block))]
        dist.all_gather(blocks, padded, self._block)
        joined_M = x_O.new_empty(len(self._owner_M))
        for rank, theirs in enumerate(blocks):
            is_theirs_M = self._owner_M == rank
            joined_M[is_theirs_M] = theirs[: int(is_theirs_M.sum())]
        return joined_M.index_copy(0, self._own_O, x_O)

    def _tokens_of_heads(self, parts: list[Tensor], slots: Slots) -> list[Tensor]:
        """All tokens of this rank's heads, in one message that has the ranks' heads of each part side by side."""
        parts_NRXD = [part.unflatten(1, (self._num_ranks, -1)) for part in parts]
        all_SXD = _swap_ranks(torch.cat(parts_NRXD, 2).transpose(0, 1), self._sequence).flatten(0, 1)
        return list(all_SXD[slots.place_U].split([part.shape[2] for part in parts_NRXD], 1))

    def _among_tensor(self, x: Tensor, now: Placement, then: Placement) -> Tensor:
        if self.num_parts == 1:
            return x
        sharded = DTensor.from_local(x, self._tensor, [now], run_check=False).redistribute(placements=[then])
        return sharded.to_local(grad_placements=[Partial()] if then.is_replicate() else None)


def _swap_ranks(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends entry `i` to rank `i` of the group, which stores it at the index of the sending rank."""
    return x_R if len(x_R) == 1 else all_to_all_single_autograd(x_R.contiguous(), None, None, group)
