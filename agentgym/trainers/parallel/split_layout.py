"""The layout of a forward pass that several ranks share: the tokens of each rank.

Any rank may have any token, since only attention depends on their order. So each has as many wanted tokens as the
others, since the vocabulary head costs most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentgym.model.linear import padded_size
from agentgym.model.packed_layout import LayoutRows, PackedLayout
from agentgym.trainers.parallel.block_exchange import BlockExchange, Slots
from agentgym.trainers.parallel.mesh import RankMesh

__all__ = ["SplitLayout"]

# Shape suffixes: U computed tokens, W wanted ones, S slots of all ranks of the pass, N slots that the products of this
# rank take, P its own slots, Q those of its wanted tokens, M wanted entries.


class SplitLayout(PackedLayout):
    """A packed layout whose tokens are split over the ranks of a block; each rank makes one, of the same entries.

    Every rank has the same number of slots, the first of them for its wanted tokens. The slots left over are padding,
    which computes the first token again and is never read.
    Example: tokens 0 to 4, of which 1, 3 and 4 are wanted, on two ranks: slots (1, 3, 0) and (4, padding, 2).
    """

    def __init__(self, mesh: RankMesh, seqlens: Sequence[int], ids_N: Tensor, mask_N: Tensor) -> None:
        device, block = ids_N.device, mesh.config.block
        super().__init__(seqlens, device, ids_N=ids_N, mask_N=mask_N)
        index_W, rest = self._split_tokens()
        max_wanted, further = max(1, -(-len(index_W) // block)), max(1, -(-len(rest) // block))
        size = padded_size(max_wanted + (further if len(rest) else 0))
        place_U = torch.empty(self.num_tokens, dtype=torch.int64, device=device)
        place_U[index_W] = _slots(len(index_W), max_wanted, size).to(device)
        place_U[rest] = _slots(len(rest), further, size).to(device) + max_wanted
        token_S = torch.zeros(block * size, dtype=torch.int64, device=device)
        token_S[place_U] = torch.arange(self.num_tokens, device=device)
        token_N = token_S.view(mesh.config.sequence, -1)[mesh.block_rank // mesh.config.tensor]
        own_P, position_N = torch.arange(size, device=device), self.every.position_U[token_N]
        own_Q = torch.where(own_P < max_wanted, own_P, 0)[: padded_size(max_wanted)]
        index_N = (torch.arange(mesh.config.tensor, device=device)[:, None] * size + own_Q).flatten()
        queries = LayoutRows(index_N, own_Q, position_N[index_N], self.wanted.blocks, self.wanted.parts, 0, index_W)
        is_every = self.wanted is self.every
        self.source_U = self.source_U[token_N]
        every, index_all_N = self.every, torch.arange(len(token_N), device=device)
        self.every = LayoutRows(index_all_N, own_P, position_N, every.blocks, every.parts, 0)
        self.wanted = self.every if is_every else queries
        place_W = _slots(len(index_W), max_wanted, len(own_Q)).to(device)
        owner_M = self.entry_M // max_wanted
        self.entry_M = self.entry_M[owner_M == mesh.block_rank] % max_wanted
        self.exchange = BlockExchange(mesh, Slots(place_U, block * size), Slots(place_W, block * len(own_Q)), owner_M)

    def _split_tokens(self) -> tuple[Tensor, Tensor]:
        """The computed tokens that are wanted, and the others."""
        index_W = self.wanted.index_U[: sum(block.num_rows for block in self.wanted.blocks)]
        is_rest_U = torch.ones(self.num_tokens, dtype=torch.bool, device=index_W.device)
        is_rest_U[index_W] = False
        return index_W, is_rest_U.nonzero()[:, 0]


def _slots(number: int, max_tokens: int, size: int) -> Tensor:
    """The slot of each of `number` tokens, when every rank holds at most `max_tokens` of them in its `size` slots."""
    index = torch.arange(number)
    return index // max_tokens * size + index % max_tokens
