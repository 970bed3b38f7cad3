"""The exchange between ranks that share one forward pass; the base class is for one process and exchanges nothing.

A pass may be shared in two ways at once. Operations that look at one token at a time work on each rank's own portion of
the tokens. Attention looks at all tokens, so the heads are split there. See `trainers/split_layout.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["ALONE", "Exchange"]

# Shape suffixes: N tokens that a product takes, P this rank's own portion of them, U all computed tokens, E model
# width, H query heads, K key/value heads, D head width, M wanted entries, O this rank's own of them, V vocabulary.


class Exchange:
    """The exchange of one process: every token, head and weight is local, and all methods return their arguments."""

    num_parts = 1
    """The number of ranks that the heads and the feed-forward are split over, each with its part of the weights."""

    def weight(self, parameter: Tensor) -> Tensor:
        """Returns the part of a parameter that this rank computes with."""
        return parameter

    def whole_weight(self, parameter: Tensor) -> Tensor:
        """Returns a whole parameter that is stored in parts on several ranks."""
        return parameter

    def embed_ids(self, ids_N: Tensor, embed_VE: Tensor) -> Tensor:
        """Returns the embeddings `[P, E]` of this rank's portion of the tokens."""
        return F.embedding(ids_N, embed_VE)

    def gather_tokens(self, x_PE: Tensor) -> Tensor:
        """Returns the tokens `[N, E]` that this rank multiplies with its part of the weights."""
        return x_PE

    def sum_parts(self, x_NE: Tensor) -> Tensor:
        """Returns the sum `[P, E]` of the outputs of all parts of the weights, for this rank's own tokens."""
        return x_NE

    def to_heads(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, cuts: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values of all computed tokens, in layout order, for a part of the heads.

        `cuts` is true if the queries are those of the wanted tokens only.
        """
        return q_NHD, k_NKD, v_NKD

    def to_tokens(self, x_UHD: Tensor, cuts: bool) -> Tensor:
        """Reverses `to_heads`: returns all heads of the tokens that were given to it."""
        return x_UHD

    def max_over_ranks(self, number: int) -> int:
        """Returns the largest of the numbers that the ranks give, which gather the weights of each pass together."""
        return number

    def own(self, x_M: Tensor) -> Tensor:
        """Selects from `x_M`, which has every wanted entry, the entries whose final states are on this rank."""
        return x_M

    def gather_entries(self, x_O: Tensor) -> Tensor:
        """Gathers numbers of all ranks' entries into `[M]`, equal on all ranks.

        The gradient goes to this rank's own entries: the other ranks compute with the same numbers, and each keeps its
        part.
        """
        return x_O


ALONE = Exchange()
"""The exchange of a pass in one process."""
