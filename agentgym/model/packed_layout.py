"""The layout of packed sequences in one forward pass: shared prefixes are computed once, final states only if wanted.

The rows of a group begin with the same prompt, and those of all groups with the same tools. Their tokens form a tree: a
segment is a run of tokens with one history, and its queries see the keys of the segments before it on its path. Causal
attention makes the states of a shared prefix the same for every sequence, so sharing changes only rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from agentgym.model.exchange import ALONE, Exchange
from agentgym.model.linear import padded_size
from agentgym.model.ops.flash_attention import AttentionLevel
from agentgym.model.ops.tree_attention import AttentionPart, causal_parts
from agentgym.model.routing import BatchRouting

__all__ = [
    "MIN_SHARED",
    "Block",
    "LayoutRows",
    "PackedLayout",
    "Segment",
    "num_computed",
    "shared_length",
    "similar_rows",
    "split_histories",
]

# Shape suffixes: N entries of the packed sequences, U computed tokens, M wanted entries, T rows of a block, L keys.

MIN_SHARED = 32
"""The length of the shortest prefix that is shared; a segment costs an attention call of its own in every layer."""
_SHORT = 512  # tokens of a sequence up to which attention by blocks is as fast as by parts
_BLOCK_ROWS = 128  # attention rows of one call: later keys of a causal block are not computed


@dataclass(frozen=True)
class Segment:
    """The computed tokens `[start, start + length)`; each sees those before it and all `ancestors`, the root first."""

    start: int
    length: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive rows of one segment, which see the first `num_keys` keys of its ancestors and itself."""

    num_rows: int
    segment: int
    num_keys: int
    make_bias: Callable[[], Tensor] | None
    """Returns the bias of 0 and -inf; None if all rows of a segment without ancestors are simply causal."""

    @cached_property
    def bias_TL(self) -> Tensor | None:
        """The bias of 0 and -inf; None if the rows are simply causal."""
        return None if self.make_bias is None else self.make_bias()


@dataclass(frozen=True, eq=False)
class LayoutRows:
    """Some of the computed tokens, in order, then padding to a size of `padded_size`."""

    index_U: Tensor
    """The indices among all computed tokens; if ranks share the pass, among the tokens of this rank's products."""
    own_U: Tensor
    """The indices in this rank's own portion; the same as `index_U` in one process."""
    position_U: Tensor
    """The positions of the tokens of `index_U` in their sequences."""
    blocks: tuple[Block, ...]
    """The blocks of all tokens, on whichever rank they are."""
    parts: tuple[AttentionPart, ...]
    """The same attention without biases; empty if all sequences are too short for it to be faster."""
    num_padding: int
    token_U: Tensor | None = None
    """The numbers of the tokens among all computed ones, without padding; None if these are all."""


class PackedLayout:
    """The mapping of packed sequences, of `seqlens` entries each in order, to the tokens that are computed.

    With `ids_N`, prefixes that sequences have in common are computed once. With `mask_N` (bool), only those entries
    have a final state. `place_N` is the computed token of each entry, `entry_M` each wanted entry's index among the
    `wanted` rows. `exchange` is what ranks that share the pass exchange in it.

    Example: ids (1, 2, 3) and (1, 2, 4) with a shared prefix (1, 2) compute 4 tokens: segments (1, 2), (3), (4).
    """

    def __init__(
        self,
        seqlens: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        ids_N: Tensor | None = None,
        mask_N: Tensor | None = None,
        min_shared: int = MIN_SHARED,
    ) -> None:
        ids = None if ids_N is None else ids_N.cpu().numpy()
        self.exchange: Exchange = ALONE
        self.routing: BatchRouting | None = None
        """The choices of experts of a mixture; None if nobody asks for them."""
        self.seqlens, self.mask_N = tuple(seqlens), mask_N
        tree = _Tree(seqlens, ids, min_shared)
        self.segments, place_N = tuple(tree.segments), tree.place_N
        self.num_tokens = tree.num_tokens
        source_U = np.zeros(self.num_tokens, np.int64)
        source_U[place_N] = np.arange(len(place_N))
        position_U = np.concatenate([np.zeros(0, np.int64), *(self._positions(segment) for segment in self.segments)])
        is_wanted_N = np.ones(len(place_N), bool) if mask_N is None else mask_N.cpu().numpy()
        mask_U = np.zeros(self.num_tokens, bool)
        mask_U[place_N[is_wanted_N]] = True
        self.source_U = torch.from_numpy(_pad_index(source_U)).to(device)
        self.place_N = torch.from_numpy(place_N).to(device)
        self._causal = _CausalBias(device)
        self.every = self._rows(np.arange(self.num_tokens), position_U, device)
        is_all = bool(mask_U.all())
        self.wanted = self.every if is_all else self._rows(np.flatnonzero(mask_U), position_U, device)
        self.entry_M = torch.from_numpy((np.cumsum(mask_U) - 1)[place_N[is_wanted_N]]).to(device)

    def _positions(self, segment: Segment) -> NDArray[np.int64]:
        return self._num_before(segment) + np.arange(segment.length)

    def _num_before(self, segment: Segment) -> int:
        return sum(self.segments[ancestor].length for ancestor in segment.ancestors)

    def _rows(
        self, index_U: NDArray[np.int64], position_U: NDArray[np.int64], device: torch.device | str
    ) -> LayoutRows:
        blocks = []
        for number, segment in enumerate(self.segments):
            first, last = np.searchsorted(index_U, (segment.start, segment.start + segment.length)).tolist()
            own = index_U[first:last] - segment.start
            if not segment.ancestors and len(own) == segment.length <= _BLOCK_ROWS:
                blocks.append(Block(segment.length, number, segment.length, None))
                continue
            for start in range(0, len(own), _BLOCK_ROWS):
                own_T = own[start : start + _BLOCK_ROWS]
                place_T = own_T + self._num_before(segment)
                blocks.append(Block(len(own_T), number, int(place_T[-1]) + 1, partial(self._causal.of, place_T)))
        padded, position = (
            torch.from_numpy(_pad_index(index_U)).to(device),
            torch.from_numpy(_pad_index(position_U[index_U])),
        )
        num_padding = len(padded) - len(index_U)
        token_U = None if len(index_U) == self.num_tokens else padded[: len(index_U)]
        return LayoutRows(
            padded, padded, position.to(device), tuple(blocks), self._parts(index_U), num_padding, token_U
        )

    @cached_property
    def levels(self) -> tuple[AttentionLevel, ...]:
        """The attention of all computed tokens for `flash_attention`."""
        device, segments = self.place_N.device, self.segments
        own = [segment.start + np.arange(segment.length) for segment in segments]
        levels = [AttentionLevel.of(own, own, device, is_causal=True)]
        ends = self._branch_ends()
        for depth in range(max(len(segment.ancestors) for segment in segments)):
            branches = [number for number, segment in enumerate(segments) if len(segment.ancestors) == depth]
            branches = [number for number in branches if ends[number] > own[number][-1] + 1]
            rows = [np.arange(own[number][-1] + 1, ends[number]) for number in branches]
            levels.append(AttentionLevel.of(rows, [own[number] for number in branches], device, is_causal=False))
        return tuple(levels)

    def levels_from(self, first_P: NDArray[np.int64]) -> tuple[AttentionLevel, ...]:
        """Returns the attention in which a token at position `p` attends to the keys from `first_P[p]` to its own.

        It is one level with a window, or with a run for each stretch of positions that begin at the same key.
        """
        if not first_P.any():
            return self.levels
        place_P = np.arange(len(first_P))
        window = int((place_P - first_P).max()) + 1
        is_window = np.array_equal(first_P, np.maximum(place_P - window + 1, 0))
        changes = np.zeros(0, int) if is_window else np.flatnonzero(np.diff(first_P)) + 1
        rows, keys = [], []
        for segment in self.segments:
            path = [self.segments[number] for number in segment.ancestors]
            token_P = np.concatenate([part.start + np.arange(part.length) for part in (*path, segment)])
            begin = len(token_P) - segment.length
            inside = changes[(changes > begin) & (changes < len(token_P))]
            for start, end in pairwise([begin, *inside.tolist(), len(token_P)]):
                rows.append(token_P[start:end])
                keys.append(token_P[first_P[start] : end])
        device = self.place_N.device
        return (AttentionLevel.of(rows, keys, device, is_causal=True, window=window if is_window else None),)

    def _parts(self, index_U: NDArray[np.int64]) -> tuple[AttentionPart, ...]:
        """Returns the attention of some of the computed tokens, in order.

        The tokens after a segment that have it as an ancestor are consecutive: they attend to it all at once.
        """
        squares, rest = [], []
        ends = self._branch_ends()
        if not any(self._num_before(segment) + segment.length > _SHORT for segment in self.segments):
            return ()
        for segment, branch_end in zip(self.segments, ends, strict=True):
            own_end = segment.start + segment.length
            first, last, further = np.searchsorted(index_U, (segment.start, own_end, branch_end)).tolist()
            own = index_U[first:last] - segment.start
            row = first
            for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else ():
                squares += causal_parts(row, len(run), segment.start + int(run[0]))
                if run[0]:
                    rest.append(AttentionPart(row, len(run), segment.start, int(run[0])))
                row += len(run)
            if further > last:
                rest.append(AttentionPart(last, further - last, segment.start, segment.length))
        return (*squares, *rest)

    def _branch_ends(self) -> list[int]:
        """Returns the end of the tokens of each segment and of those that have it as an ancestor."""
        ends = [segment.start + segment.length for segment in self.segments]
        for segment, end in zip(self.segments, tuple(ends), strict=True):
            for ancestor in segment.ancestors:
                ends[ancestor] = max(ends[ancestor], end)
        return ends


def split_histories(x_NHD: Tensor, layout: PackedLayout) -> list[Tensor]:
    """Returns what each segment's queries attend to: its ancestors' parts and its own, `[L, H, D]`."""
    parts = x_NHD.split([*(segment.length for segment in layout.segments), layout.every.num_padding])
    return [
        torch.cat([parts[number] for number in (*segment.ancestors, index)]) if segment.ancestors else parts[index]
        for index, segment in enumerate(layout.segments)
    ]


class _Tree:
    """The segments of packed sequences, and the computed token of each entry; without ids nothing is shared."""

    def __init__(self, seqlens: Sequence[int], ids_N: NDArray[np.int64] | None, min_shared: int) -> None:
        starts = [0, *accumulate(seqlens)]
        self._seqlens, self._min_shared = seqlens, min_shared
        self._rows = None if ids_N is None else [ids_N[a:b] for a, b in pairwise(starts)]
        self._starts = starts
        self.segments: list[Segment] = []
        self.num_tokens = 0
        self.place_N = np.zeros(starts[-1], np.int64)
        self._grow(range(len(seqlens)), 0, ())

    def _grow(self, rows: Iterable[int], done: int, ancestors: tuple[int, ...]) -> None:
        """Adds the segments of rows that are equal in their first `done` entries, which the ancestors hold."""
        alike: dict[object, list[int]] = {}
        for row in rows:
            if self._seqlens[row] > done:
                alike.setdefault(self._key(row, done), []).append(row)
        for members in alike.values():
            length = self._num_common_tokens(members, done)
            number = len(self.segments)
            self.segments.append(Segment(self.num_tokens, length, ancestors))
            for row in members:
                start = self._starts[row] + done
                self.place_N[start : start + length] = self.num_tokens + np.arange(length)
            self.num_tokens += length
            self._grow(members, done + length, (*ancestors, number))

    def _key(self, row: int, done: int) -> object:
        """Returns a key that is equal for rows whose next entries are worth sharing."""
        if self._rows is None or self._seqlens[row] < done + self._min_shared:
            return row
        return self._rows[row][done : done + self._min_shared].tobytes()

    def _num_common_tokens(self, members: Sequence[int], done: int) -> int:
        if self._rows is None or len(members) == 1:
            return self._seqlens[members[0]] - done
        first = self._rows[members[0]][done:]
        return min(shared_length(first, self._rows[row][done:]) for row in members)


def num_computed(rows: Sequence[Tensor], min_shared: int = MIN_SHARED) -> int:
    """Returns the number of tokens that a layout of these rows' ids computes, shared prefixes counted once."""
    return _Tree([len(row) for row in rows], torch.cat(list(rows)).numpy(), min_shared).num_tokens


def shared_length(a_T: NDArray[np.int64], b_T: NDArray[np.int64]) -> int:
    """Returns the number of equal leading elements."""
    length = min(len(a_T), len(b_T))
    differs = a_T[:length] != b_T[:length]
    return int(differs.argmax()) if differs.any() else length


class _CausalBias:
    """The biases that hide later keys.

    Those of consecutive rows are views of one memory: a copy for each block of a long sequence would grow with the
    square of its length.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._shared_TL = torch.zeros(0, 0)

    def of(self, place_T: NDArray[np.int64]) -> Tensor:
        """Returns the biases that rows at these positions add to their scores, `[T, L]`: -inf on later keys."""
        first, last, num_rows = int(place_T[0]), int(place_T[-1]), len(place_T)
        if last - first + 1 != num_rows or num_rows > _BLOCK_ROWS:
            hidden_TL = torch.arange(last + 1) > torch.from_numpy(place_T)[:, None]
            return torch.zeros(hidden_TL.shape).masked_fill_(hidden_TL, -torch.inf).to(self._device)
        num_before = self._shared_TL.shape[1] - _BLOCK_ROWS
        if first > num_before:
            num_before = max(first, 2 * num_before, 1024)
            later_TT = torch.full((_BLOCK_ROWS, _BLOCK_ROWS), -torch.inf).triu(1)
            self._shared_TL = F.pad(later_TT, (num_before, 0)).to(self._device)
        bias_TL = self._shared_TL[:num_rows, num_before - first : num_before + num_rows]
        if bias_TL.device.type == "cpu":
            return bias_TL
        return bias_TL.clone(memory_format=torch.contiguous_format)  # GPU kernels need aligned rows


def _pad_index(index_U: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.pad(index_U, (0, padded_size(len(index_U)) - len(index_U)))


def similar_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the rows in groups whose lengths differ by a quarter at most, without rows of no tokens."""
    groups: list[list[int]] = []
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: lengths[row]):
        if not groups or lengths[row] > 1.25 * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups
