"""What ranks that share one forward pass exchange in it; here, for a pass of one process: nothing.

A pass may be shared two ways at once. The tokens lie on all of its ranks, a portion on each, for everything that looks
at a token alone; and the heads are split, because attention looks at all tokens. See `trainers/split_layout.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["ALONE", "Exchange"]

# Shape suffixes: N tokens that a product takes, P this rank's own portion of them, U all computed tokens, E model
# width, H query heads, K key/value heads, D head width, M wanted entries, O this rank's own of them, V vocabulary.


class Exchange:
    """One process: every token, head and weight is here, and all of these give what they are given."""

    num_parts = 1
    """Ranks that the heads and the feed-forward are split over, each with its part of the weights."""

    def weight(self, parameter: Tensor) -> Tensor:
        """What this rank computes with of a parameter."""
        return parameter

    def whole_weight(self, parameter: Tensor) -> Tensor:
        """All of a parameter that lies on several ranks in parts."""
        return parameter

    def embedded(self, ids_N: Tensor, embed_VE: Tensor) -> Tensor:
        """The embeddings `[P, E]` of this rank's portion of the tokens."""
        return F.embedding(ids_N, embed_VE)

    def gathered(self, x_PE: Tensor) -> Tensor:
        """The tokens `[N, E]` that this rank multiplies with its part of the weights."""
        return x_PE

    def summed(self, x_NE: Tensor) -> Tensor:
        """The sum `[P, E]` of what all parts of the weights gave, for this rank's own tokens."""
        return x_NE

    def to_heads(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, cuts: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all computed tokens, in the order of the layout, for a part of the heads;
        `cuts` says that the queries are those of the wanted tokens alone."""
        return q_NHD, k_NKD, v_NKD

    def to_tokens(self, x_UHD: Tensor, cuts: bool) -> Tensor:
        """The way back: all heads of the tokens that `to_heads` was given."""
        return x_UHD

    def own(self, x_M: Tensor) -> Tensor:
        """Of something about every wanted entry, what is about the entries whose final states are here."""
        return x_M

    def joined(self, x_O: Tensor) -> Tensor:
        """Numbers of this rank's own entries, with those of the other ranks: `[M]`, the same on all of them. The
        gradient goes to this rank's own: the other ranks compute with the same numbers, and each keeps its part."""
        return x_O


ALONE = Exchange()
"""The exchange of a pass of one process."""
