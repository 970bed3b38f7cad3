"""The slots of the in-process engine: preallocated keys and values, their tokens, and their owners."""

from __future__ import annotations

import heapq
import mmap
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.common_keys import CommonKeys
from agentgym.engines.local.machine_memory import LARGE_PAGE, available_memory, lazy_zeros
from agentgym.errors import ConfigError
from agentgym.model.language_model import KvShape, LanguageModel
from agentgym.model.state_cache import StateName
from agentgym.model.transformers_model import TransformersModel

__all__ = ["L_BLOCK", "SlotCache", "fitting_slots", "round_up"]

# Shape suffixes: S slots, W window (positions of a slot), K key/value heads, D head width.

L_BLOCK = 64
"""Attention reads keys up to a multiple of this; keys beyond a row's own position are masked."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def fitting_slots(
    model: LanguageModel, window: int, max_slots: int = 128, *, record_experts: bool = False, reserve_bytes: int = 0
) -> int:
    """Returns how many slots of `window` tokens fit into half of the free memory: at most `max_slots`, at least 1.

    `reserve_bytes` are bytes of it that others will need.
    """
    numbers = sum(int(np.prod(_slot_shape(kv_shape, window))) for kv_shape in model.kv_shapes)
    state_bytes = sum(state_S.nbytes for state_S in _zero_states(model, 1).values())
    slot_bytes = max(1, numbers * model.embed.element_size() + state_bytes)
    if record_experts and model.embed.device.type == "cpu":  # the record is not on the device
        slot_bytes += window * len(model.routers) * model.num_chosen() * np.dtype(np.int16).itemsize
    free = max(0, _free_memory(model.embed.device) - reserve_bytes)
    return max(1, min(max_slots, free // 2 // slot_bytes - 1))  # one more slot is scratch


def _slot_shape(kv_shape: KvShape, window: int) -> tuple[int, int, int, int]:
    """Returns the sizes of a slot in a layer: keys and values, heads, positions and width."""
    return 2, kv_shape.num_heads, round_up(window, L_BLOCK), kv_shape.width


def _free_memory(device: torch.device) -> int:
    """Returns the bytes that a device can give; on CPU the limit of the container counts too."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


class SlotCache:
    """The keys and values of `num_slots` sequences of up to `window` tokens, with their bookkeeping.

    `kv` is one `[2, S + 1, K, W, D]` tensor per layer (each with a storage of its own: a compiled step that writes a
    part of a tensor may copy the whole); the last slot is scratch for padding rows. `num_valid_S` counts the leading
    positions of `tokens_SW` whose keys and values are those of the current weights; `num_known_S` counts the tokens. A
    slot is free, owned by a session at work, or owned by a session between two turns (idle). If a session needs a slot
    and none is free, the one idle for longest is evicted: its prefix is recomputed if its session comes back.

    Recurrent layers of a model have `states` instead, `[S + 1, ...]` each: those after the `num_valid_S` tokens. They
    cannot go back, so a prefix can be continued only where it ends.
    """

    def __init__(self, model: LanguageModel, num_slots: int, window: int) -> None:
        self.num_slots, self.window = num_slots, window
        self.experts_SWRK: NDArray[np.int16] | None = None
        """The experts of each token; None unless they are recorded."""
        shapes = []
        for kv_shape in model.kv_shapes:
            keys_and_values, *rest = _slot_shape(kv_shape, window)
            shapes.append((keys_and_values, num_slots + 1, *rest))
        self.kv, self._pages = _zeros(shapes, model.embed)
        self.states = _zero_states(model, num_slots + 1)
        self.tokens_SW = np.zeros((num_slots, window), np.int64)
        # A hash of the tokens up to each: a sum of products with random numbers, so that prefixes are found by it.
        self._hash_SW = np.zeros((num_slots, window), np.uint64)
        self._factor_W = np.random.default_rng(0).integers(2**64, size=window, dtype=np.uint64)
        self.common = CommonKeys(num_slots, window)
        """The slots that begin with copies of other slots' keys."""
        self.num_known_S = np.zeros(num_slots, np.int64)
        self.num_valid_S = np.zeros(num_slots, np.int64)
        self._slot_of: dict[str, int] = {}
        self._session_of: list[str | None] = [None] * num_slots
        self._idle: OrderedDict[int, float] = OrderedDict()  # idle since when, the longest idle first
        self._free = list(range(num_slots))

    def record_experts(self, model: LanguageModel) -> None:
        """Keeps the experts of each token from now on; raises ConfigError for a model that reports none."""
        num_routers, num_chosen = len(model.routers), model.num_chosen() if model.routers else 0
        if not num_chosen:
            raise ConfigError("record_experts is for mixtures of experts whose routers choose by topk: leave it out")
        self.experts_SWRK = np.zeros((self.num_slots, self.window, num_routers, num_chosen), np.int16)

    @property
    def num_idle(self) -> int:
        """The number of slots whose sessions are between two turns."""
        return len(self._idle)

    def has_slot(self, session: str) -> bool:
        """Returns whether the session has a slot."""
        return session in self._slot_of

    def idle_sessions(self) -> list[str]:
        """Returns the sessions between two turns that have a slot, the longest idle first."""
        return [session for slot in self._idle if (session := self._session_of[slot]) is not None]

    def num_available(self, idle_before: float) -> int:
        """Returns the number of slots for new sessions: the free ones, and those idle since before `idle_before`."""
        return len(self._free) + sum(since <= idle_before for since in self._idle.values())

    def acquire(self, session: str, idle_before: float) -> int:
        """Returns the session's own slot, else a free one, else the one idle for longest, of the `num_available`."""
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
        """Marks the slot idle since `now`: it is kept for its session's next turn."""
        self._idle[slot] = now

    @property
    def idle_since(self) -> float | None:
        """Returns the time since which the longest idle slot is idle."""
        return next(iter(self._idle.values()), None)

    def release(self, session: str) -> None:
        """Frees the session's slot, if it has one. Its tokens stay readable as a prefix until the slot is reused."""
        slot = self._slot_of.get(session)
        if slot is not None:
            self._idle.pop(slot, None)
            self._forget(slot)
            heapq.heappush(self._free, slot)

    def load(self, slot: int, prompt_T: NDArray[np.int64]) -> None:
        """Makes `prompt_T` the slot's tokens; the prefix shared with the tokens before stays valid."""
        num_known = min(int(self.num_valid_S[slot]), len(prompt_T) - 1)
        differs = np.flatnonzero(self.tokens_SW[slot, :num_known] != prompt_T[:num_known])
        shared = int(differs[0]) if differs.size else num_known
        goes_back = shared < self.num_valid_S[slot]
        self.num_valid_S[slot] = 0 if self.states and goes_back else shared
        self.common.keep(slot, int(self.num_valid_S[slot]))
        self.tokens_SW[slot, : len(prompt_T)] = prompt_T
        self._hash_SW[slot, : len(prompt_T)] = (_factors(prompt_T) * self._factor_W[: len(prompt_T)]).cumsum()
        self.num_known_S[slot] = len(prompt_T)

    def append(self, slot_R: NDArray[np.int64], id_R: NDArray[np.int64]) -> None:
        """Adds a token to each slot, all of which have a prompt."""
        num_known_R = self.num_known_S[slot_R]
        self.tokens_SW[slot_R, num_known_R] = id_R
        added_R = _factors(id_R) * self._factor_W[num_known_R]
        self._hash_SW[slot_R, num_known_R] = self._hash_SW[slot_R, num_known_R - 1] + added_R
        self.num_known_S[slot_R] = num_known_R + 1

    def common_prefix_S(self, slot: int, at_least: int) -> NDArray[np.int64]:
        """Returns how many leading tokens each slot shares with `slot`, their keys computed or not, `[S]`.

        It is 0 for a slot that shares less than `at_least`, of the tokens that `slot` has. It is found by hashes, in a
        time that hardly depends on the lengths: see `shares`.
        """
        least_S = np.zeros(self.num_slots, np.int64)
        same_S = self._hash_SW[:, at_least - 1] == self._hash_SW[slot, at_least - 1]
        same_S[slot] = False
        open_S = np.flatnonzero(same_S & (self.num_known_S >= at_least))
        least_S[open_S] = at_least
        max_S = np.minimum(self.num_known_S, self.num_known_S[slot])
        middle_S = max_S  # most share all or no more
        while (open_S := open_S[least_S[open_S] < max_S[open_S]]).size:
            middle = middle_S[open_S]
            same = self._hash_SW[open_S, middle - 1] == self._hash_SW[slot, middle - 1]
            least_S[open_S[same]], max_S[open_S[~same]] = middle[same], middle[~same] - 1
            middle_S = (least_S + max_S + 1) // 2
        return least_S

    def shares(self, source: int, target: int, num_tokens: int) -> bool:
        """Returns whether two slots share their first tokens, token by token."""
        return np.array_equal(self.tokens_SW[source, :num_tokens], self.tokens_SW[target, :num_tokens])

    def release_memory(self) -> None:
        """Frees the memory of keys and values, which become stale; on CPU it is allocated again as it is written."""
        self.invalidate()
        for kv in self.kv:
            if kv.device.type != "cpu":
                kv.untyped_storage().resize_(0)
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)

    def regain_memory(self) -> None:
        """Allocates memory for keys and values again."""
        for kv in self.kv:
            if not kv.untyped_storage().nbytes():
                kv.untyped_storage().resize_(kv.numel() * kv.element_size())
                kv.zero_()

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` keys and values from one slot to another, in every layer, and the states.

        A slot with states has exactly so many valid tokens.
        """
        for kv in self.kv:
            kv[:, target, :, :num_tokens] = kv[:, source, :, :num_tokens]
        for state_S in self.states.values():
            state_S[target] = state_S[source]
        if self.experts_SWRK is not None:
            self.experts_SWRK[target, :num_tokens] = self.experts_SWRK[source, :num_tokens]
        self.num_valid_S[target] = num_tokens
        self.common.note_copy(source, target, num_tokens)

    def invalidate(self) -> None:
        """Marks every key and value as stale, because the weights changed."""
        self.num_valid_S[:] = 0
        self.common.forget()

    def erase(self) -> None:
        """Zeroes keys and values, so that no later request reads what a failed step wrote (possibly NaN)."""
        self.invalidate()
        for kv in self.kv:
            kv.zero_()

    def _forget(self, slot: int) -> None:
        session = self._session_of[slot]
        assert session is not None
        del self._slot_of[session]
        self._session_of[slot] = None


def _factors(id_T: NDArray[np.int64]) -> NDArray[np.uint64]:
    return id_T.astype(np.uint64) + np.uint64(1)


def _zero_states(model: LanguageModel, num_slots: int) -> dict[StateName, Tensor]:
    """Returns the states of all slots before the first token; empty for a model that has none."""
    if not isinstance(model, TransformersModel):
        return {}
    states, like = model.probe_states().items(), model.embed
    return {name: like.new_zeros((num_slots, *state_1.shape[1:]), dtype=state_1.dtype) for name, state_1 in states}


def _zeros(shapes: Sequence[tuple[int, ...]], like: Tensor) -> tuple[tuple[Tensor, ...], tuple[mmap.mmap, ...]]:
    """Returns a tensor per layer; on CPU also the pages that each is stored in.

    A slot's keys of a head are in pages that are not large if its window is: a short sequence would take a large one in
    each layer (4.6 GB of 18 layers with 64 sequences, whose keys are 0.1 GB).
    """
    sizes = [int(np.prod(shape)) * like.element_size() for shape in shapes]
    try:
        if like.device.type != "cpu":
            return tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes), ()
        are_dense = [shape[3] * shape[4] * like.element_size() <= LARGE_PAGE for shape in shapes]
        pages = tuple(lazy_zeros(size, in_large_pages=large) for size, large in zip(sizes, are_dense, strict=True))
    except (MemoryError, OSError, OverflowError, torch.OutOfMemoryError) as error:
        num_slots, window = shapes[0][1] - 1, shapes[0][3]
        raise ConfigError(
            f"the key/value cache needs {sum(sizes) / 2**30:.1f} GiB ({num_slots} slots of {window} tokens), which"
            f" {like.device} does not give: set a smaller context window, or fewer requests at once"
        ) from error
    tensors = zip(pages, shapes, strict=True)
    return tuple(torch.frombuffer(page, dtype=like.dtype).view(shape) for page, shape in tensors), pages
