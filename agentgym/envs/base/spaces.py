"""A Gymnasium space of Unicode text, and what vector environments need to batch and share it."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, overload

import numpy as np
from gymnasium.spaces import Space
from gymnasium.spaces import Tuple as TupleSpace
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import (
    batch_differing_spaces,
    concatenate,
    create_empty_array,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)
from gymnasium.wrappers.utils import create_zero_array

from agentgym.errors import ConfigError, EnvironmentFault

__all__ = ["Text"]

SHARED_BYTES = 256 * 1024
"""Bytes of shared memory for one unbounded text; the error for a longer one names the way out."""
HEADER_BYTES = 4
SAMPLE_WORDS = ("look", "north", "south", "take", "key", "open", "door", "help", "7", "wait", "yes", "é", "日本")


class Text(Space[str]):
    """Every Unicode string (of at most `max_length` characters, when given); `Text().contains("naïve ☕")` is true.

    Gymnasium's own `Text` lists its characters one by one and so refuses most of Unicode.
    """

    def __init__(self, max_length: int | None = None, *, seed: int | np.random.Generator | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise ConfigError(f"max_length must be at least 1 character, or None for no limit; got {max_length}")
        self.max_length = max_length
        super().__init__(shape=None, dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: a text of any length has no flat array."""
        return False

    def sample(self, mask: object = None, probability: object = None) -> str:
        """A few words, now and then with characters outside ASCII; `mask` and `probability` are not supported."""
        if mask is not None or probability is not None:
            raise ConfigError("Text.sample takes neither mask nor probability; its strings have no fixed alphabet")
        count = int(self.np_random.integers(1, 4))
        words = [SAMPLE_WORDS[int(i)] for i in self.np_random.integers(0, len(SAMPLE_WORDS), size=count)]
        text = " ".join(words)
        return text if self.max_length is None else text[: self.max_length]

    def contains(self, x: object) -> bool:
        """True if `x` is a `str` within the length limit."""
        return isinstance(x, str) and (self.max_length is None or len(x) <= self.max_length)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """The texts themselves; JSON knows strings."""
        return [str(text) for text in sample_n]

    def from_jsonable(self, sample_n: Sequence[Any]) -> list[str]:
        """The inverse of `to_jsonable`."""
        return [str(text) for text in sample_n]

    def __repr__(self) -> str:
        return "Text()" if self.max_length is None else f"Text({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]  # like every Gymnasium space: mutable, compared by value


def _slot_bytes(space: Text) -> int:
    needed = SHARED_BYTES if space.max_length is None else 4 * space.max_length
    return HEADER_BYTES + min(needed, SHARED_BYTES)


@create_shared_memory.register(Text)
def _create_shared(space: Text, n: int = 1, ctx: ModuleType = multiprocessing) -> Any:
    return ctx.Array(ctypes.c_ubyte, n * _slot_bytes(space))


@write_to_shared_memory.register(Text)
def _write_shared(space: Text, index: int, value: str, shared_memory: Any) -> None:
    slot = _slot_bytes(space)
    data = value.encode("utf-8", "surrogatepass")
    if len(data) > slot - HEADER_BYTES:
        limit = slot - HEADER_BYTES
        raise EnvironmentFault(
            f"an observation of {len(data)} bytes does not fit the {limit} bytes shared per environment; "
            "pass shared_memory=False in vector_kwargs"
        )
    view = memoryview(shared_memory.get_obj()).cast("B")
    start = index * slot
    view[start : start + HEADER_BYTES] = len(data).to_bytes(HEADER_BYTES, "little")
    view[start + HEADER_BYTES : start + HEADER_BYTES + len(data)] = data


class SharedTexts(Sequence[str]):
    """The texts in shared memory at the time of reading; a deep copy is the tuple of them.

    AsyncVectorEnv reads once and keeps what it got, so this is a view, as an array would be.
    """

    def __init__(self, space: Text, shared_memory: Any, n: int) -> None:
        self._view = memoryview(shared_memory.get_obj()).cast("B")
        self._slot = _slot_bytes(space)
        self._n = n

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        start = range(self._n)[index] * self._slot + HEADER_BYTES
        length = int.from_bytes(self._view[start - HEADER_BYTES : start], "little")
        return bytes(self._view[start : start + length]).decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # it changes as the environments step

    def __deepcopy__(self, memo: dict[int, object]) -> tuple[str, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return repr(tuple(self))


@read_from_shared_memory.register(Text)
def _read_shared(space: Text, shared_memory: Any, n: int = 1) -> SharedTexts:
    return SharedTexts(space, shared_memory, n)


@concatenate.register(Text)
def _concatenate(space: Text, items: Iterable[str], out: object) -> tuple[str, ...]:
    return tuple(items)


@create_empty_array.register(Text)
def _create_empty(space: Text, n: int = 1, fn: Callable[..., Any] = np.zeros) -> tuple[str, ...]:
    return ("",) * n


@create_zero_array.register(Text)
def _create_zero(space: Text) -> str:  # type: ignore[misc]  # declared for all spaces
    return ""


@batch_differing_spaces.register(Text)
def _batch_differing(spaces: Any) -> TupleSpace[Any]:  # type: ignore[misc]  # dispatched on the first of the sequence
    return TupleSpace(tuple(spaces))


@is_space_dtype_shape_equiv.register(Text)
def _equivalent(space_1: Text, space_2: object) -> bool:
    return isinstance(space_2, Text)
