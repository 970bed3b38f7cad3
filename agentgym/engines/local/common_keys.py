"""The slots of the in-process engine that begin with the same keys and values, so that attention reads them once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["CommonKeys"]

# Shape suffixes: S slots, N rows of a step, D decoded rows.


class CommonKeys:
    """Notes for each slot how many of its first keys are equal, bit for bit, to those of another one, its root."""

    def __init__(self, num_slots: int, window: int) -> None:
        self._window = window
        self._root_S = np.arange(num_slots)
        self._num_S = np.zeros(num_slots, np.int64)

    def note_copy(self, source: int, target: int, num_tokens: int) -> None:
        """Notes that the first keys of `source` were copied to `target`."""
        of_root = num_tokens <= self._num_S[source]
        self._root_S[target] = self._root_S[source] if of_root else source
        self._num_S[target] = num_tokens

    def keep(self, slot: int, num_tokens: int) -> None:
        """Notes that all but the first keys of a slot will be overwritten."""
        shorter_S = (self._root_S == slot) & (self._num_S > num_tokens)
        shorter_S[slot] |= self._num_S[slot] > num_tokens
        self._num_S[shorter_S] = num_tokens

    def forget(self) -> None:
        """Notes that all keys will be overwritten."""
        self._num_S[:] = 0

    def of(self, slot_N: NDArray[np.int64], num_decode: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the root of each row's slot, and how many of its keys are read there, `[N]` each.

        A slot whose root it is not, but that is the root of others, is read with those. Rows of a prompt are read in
        their own slot.
        """
        slot_D = slot_N[:num_decode]
        root_D, num_D = self._root_S[slot_D], self._num_S[slot_D]
        lead_S = np.zeros_like(self._num_S)
        np.maximum.at(lead_S, root_D, num_D)
        leads_D = lead_S[slot_D] > 0
        root_N, num_N = slot_N.copy(), np.full(len(slot_N), self._window)
        root_N[:num_decode] = np.where(leads_D, slot_D, root_D)
        num_N[:num_decode] = np.where(leads_D, lead_S[slot_D], num_D)
        return root_N, num_N
