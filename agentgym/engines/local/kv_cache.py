"""The slots of the in-process engine: preallocated keys and values, the tokens they stand for, and who owns them."""

from __future__ import annotations

import heapq
import mmap
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.machine_memory import available_memory
from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder

__all__ = ["L_BLOCK", "SlotCache", "fitting_slots", "round_up"]

# Shape suffixes: S slots, W window (positions of a slot), K key/value heads, D head width.

L_BLOCK = 64
"""Attention reads keys up to a multiple of this; what lies beyond a row's own position is masked."""
_QUICK = 16  # tokens compared first when prefixes are sought


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def fitting_slots(model: Decoder, window: int, wanted: int = 128) -> int:
    """The number of slots of `window` tokens that fit into half of the free memory: at most `wanted`, at least 1."""
    slot_bytes = int(np.prod(_slot_shape(model, window))) * model.embed.element_size() * model.config.num_layers
    free = _free_memory(model.embed.device)
    return max(1, min(wanted, free // 2 // slot_bytes - 1))  # one more slot is scratch


def _slot_shape(model: Decoder, window: int) -> tuple[int, int, int, int]:
    """Keys and values, heads, positions and width of a slot in a layer.

    There is a block of positions more than can be read, so that what is read is a part whatever its length: one graph
    serves all.
    """
    c = model.config
    return 2, c.num_kv_heads, round_up(window, L_BLOCK) + L_BLOCK, c.head_width


def _free_memory(device: torch.device) -> int:
    """Bytes that a device can give; on CPU the limit of the container counts too."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


class SlotCache:
    """Keys and values of `num_slots` sequences of up to `window` tokens, and the books about them.

    `kv` is one `[2, S + 1, K, W, D]` a layer (of its own storage each: a compiled step that writes a part of a tensor
    may copy the whole); the last slot is scratch for padding rows. `num_valid_S` counts the leading
    positions of `tokens_SW` whose keys and values are those of the current weights; `num_known_S` counts the tokens.
    A slot is free, owned by a session at work, or owned by a session between two turns (idle). When a session needs a
    slot and none is free, the one idle for longest is evicted: its prefix is computed again if its session comes back.
    """

    def __init__(self, model: Decoder, num_slots: int, window: int) -> None:
        c = model.config
        self.num_slots, self.window = num_slots, window
        keys_and_values, *rest = _slot_shape(model, window)
        shape = (keys_and_values, num_slots + 1, *rest)
        self.kv, self._pages = _zeros(c.num_layers, shape, model.embed)
        self.kv_flat = tuple(kv.view(-1, c.head_width) for kv in self.kv)
        # The first row in `kv_flat` of every slot's keys, then values, head by head.
        heads = np.arange(2 * (num_slots + 1) * c.num_kv_heads).reshape(2, num_slots + 1, c.num_kv_heads)
        self._first_row_SH = heads.transpose(1, 0, 2).reshape(num_slots + 1, -1) * shape[3]
        self.tokens_SW = np.zeros((num_slots, window), np.int64)
        self.num_known_S = np.zeros(num_slots, np.int64)
        self.num_valid_S = np.zeros(num_slots, np.int64)
        self._slot_of: dict[str, int] = {}
        self._session_of: list[str | None] = [None] * num_slots
        self._idle: OrderedDict[int, float] = OrderedDict()  # since when, the longest first
        self._free = list(range(num_slots))

    def owns(self, session: str) -> bool:
        """Whether the session has a slot."""
        return session in self._slot_of

    def num_available(self, idle_before: float) -> int:
        """How many slots new sessions may take: the free ones, and those idle since before `idle_before`."""
        return len(self._free) + sum(since <= idle_before for since in self._idle.values())

    def acquire(self, session: str, idle_before: float) -> int:
        """The session's own slot, else a free one, else the one idle for longest, of the `num_available`."""
        slot = self._slot_of.get(session)
        if slot is not None:
            self._idle.pop(slot, None)
            return slot
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, since = self._idle.popitem(last=False)
            assert since <= idle_before
            self._forget(slot)
        self._slot_of[session], self._session_of[slot] = slot, session
        return slot

    def rest(self, slot: int, now: float) -> None:
        """Marks the slot idle since `now`: kept for its session's next turn."""
        self._idle[slot] = now

    @property
    def idle_since(self) -> float | None:
        """Since when the slot idle for longest is idle."""
        return next(iter(self._idle.values()), None)

    def release(self, session: str) -> None:
        """Frees what the session holds, if anything. Its tokens stay readable as a prefix until the slot is reused."""
        slot = self._slot_of.get(session)
        if slot is not None:
            self._idle.pop(slot, None)
            self._forget(slot)
            heapq.heappush(self._free, slot)

    def load(self, slot: int, prompt_T: NDArray[np.int64]) -> None:
        """Makes `prompt_T` the slot's tokens, keeping as valid the prefix it shares with what was there."""
        known = min(int(self.num_valid_S[slot]), len(prompt_T) - 1)
        differs = np.flatnonzero(self.tokens_SW[slot, :known] != prompt_T[:known])
        self.num_valid_S[slot] = int(differs[0]) if differs.size else known
        self.tokens_SW[slot, : len(prompt_T)] = prompt_T
        self.num_known_S[slot] = len(prompt_T)

    def common_prefix_S(self, slot: int) -> NDArray[np.int64]:
        """How many leading tokens every slot shares with `slot`, whether their keys are computed yet or not, `[S]`."""
        num_known = int(self.num_known_S[slot])
        tokens_T = self.tokens_SW[slot, :num_known]
        shared_S = np.zeros(self.num_slots, np.int64)
        quick = min(_QUICK, num_known)
        alike = np.flatnonzero((self.tokens_SW[:, :quick] == tokens_T[:quick]).all(1) & (self.num_known_S > 0))
        same = self.tokens_SW[alike, :num_known] == tokens_T
        shared = np.where(same.all(1), num_known, same.argmin(1))
        shared_S[alike] = np.minimum(shared, self.num_known_S[alike])
        shared_S[slot] = 0
        return shared_S

    def flat_indices(self, slot_N: NDArray[np.int64], position_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of a layer's `kv_flat` that hold the keys, then the values, of each token, `[N * 2K]`."""
        return (self._first_row_SH[slot_N] + position_N[:, None]).ravel()

    def release_memory(self) -> None:
        """Gives up the memory of keys and values, which are stale then; on CPU it comes back where they are written."""
        self.invalidate()
        for kv in self.kv:
            if kv.device.type != "cpu":
                kv.untyped_storage().resize_(0)
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)

    def regain_memory(self) -> None:
        """Takes memory for keys and values again."""
        for kv in self.kv:
            if not kv.untyped_storage().nbytes():
                kv.untyped_storage().resize_(kv.numel() * kv.element_size())
                kv.zero_()

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` keys and values from one slot to another, in every layer."""
        for kv in self.kv:
            kv[:, target, :, :num_tokens] = kv[:, source, :, :num_tokens]
        self.num_valid_S[target] = num_tokens

    def invalidate(self) -> None:
        """Declares every key and value stale: the weights are others now."""
        self.num_valid_S[:] = 0

    def erase(self) -> None:
        """Zeroes keys and values: what a failed step wrote (NaN among it) must reach no later request."""
        self.invalidate()
        for kv in self.kv:
            kv.zero_()

    def _forget(self, slot: int) -> None:
        session = self._session_of[slot]
        assert session is not None
        del self._slot_of[session]
        self._session_of[slot] = None


def _zeros(num_layers: int, shape: tuple[int, ...], like: Tensor) -> tuple[tuple[Tensor, ...], tuple[mmap.mmap, ...]]:
    """A tensor a layer; on CPU also the pages that each lies in."""
    num_bytes = int(np.prod(shape)) * like.element_size()
    try:
        if like.device.type != "cpu":
            return tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers)), ()
        pages = tuple(_lazy_zeros(num_bytes) for _ in range(num_layers))
    except (MemoryError, OSError, OverflowError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"the key/value cache needs {num_layers * num_bytes / 2**30:.1f} GiB ({shape[1] - 1} slots of {shape[3]}"
            f" tokens), which {like.device} does not give; lower num_slots or window"
        ) from error
    return tuple(torch.frombuffer(one, dtype=like.dtype).view(shape) for one in pages), pages


def _lazy_zeros(num_bytes: int) -> mmap.mmap:
    # Zeroed pages of the system, which cost nothing until they are used; aligned for vector loads, as pages are.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
