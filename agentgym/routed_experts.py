"""The experts that the routers of a mixture gave the tokens of a sequence to, as an engine reports and a run stores."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import InvalidTrajectory
from agentgym.types import JSON

__all__ = ["RoutedExperts"]

# Shape suffixes: T tokens, R routers, K experts of a token.


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of consecutive tokens, the first of which is at position `start` of its sequence.

    Example: `RoutedExperts.of(np.array([[[3, 7], [0, 2]]]))` is one token, given to the experts 3 and 7 by the first
    router, and to 0 and 2 by the second.
    """

    start: int
    num_routers: int
    num_chosen: int
    data: bytes
    """int16 `[T, R, K]`, little-endian; -1 where an expert is not known."""

    def __post_init__(self) -> None:
        size = 2 * self.num_routers * self.num_chosen
        if self.start < 0 or size <= 0 or len(self.data) % size:
            shape = f"{self.num_routers} routers of {self.num_chosen} experts"
            raise InvalidTrajectory(f"{len(self.data)} bytes of experts from token {self.start} on are not {shape}")

    @classmethod
    def of(cls, experts_TRK: NDArray[Any], start: int = 0) -> RoutedExperts:
        """Returns the experts of tokens from position `start` on."""
        _, num_routers, num_chosen = experts_TRK.shape
        return cls(start, num_routers, num_chosen, experts_TRK.astype("<i2").tobytes())

    @property
    def experts_TRK(self) -> NDArray[np.int16]:
        """The experts as an array, which cannot be written to."""
        return np.frombuffer(self.data, "<i2").reshape(-1, self.num_routers, self.num_chosen)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.data) // (2 * self.num_routers * self.num_chosen)

    def since(self, position: int) -> RoutedExperts:
        """Returns the experts of the tokens from a position on."""
        return RoutedExperts.of(self.experts_TRK[max(0, position - self.start) :], max(self.start, position))

    def after(self, earlier: RoutedExperts | None) -> RoutedExperts:
        """Returns the earlier experts, and these for the tokens after them."""
        if earlier is None or earlier.stop < self.start:
            return self
        return RoutedExperts(
            earlier.start, self.num_routers, self.num_chosen, earlier.data + self.since(earlier.stop).data
        )

    def to_json(self) -> dict[str, JSON]:
        """Returns the form in which a run stores it."""
        shape = [self.stop - self.start, self.num_routers, self.num_chosen]
        return {"start": self.start, "shape": shape, "data": b64encode(zlib.compress(self.data)).decode()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> RoutedExperts:
        """Reads the stored form; raises InvalidTrajectory if it is damaged."""
        num_tokens, num_routers, num_chosen = stored["shape"]
        size = 2 * num_tokens * num_routers * num_chosen
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(b64decode(stored["data"], validate=True), size + 1)
        except (zlib.error, ValueError) as error:
            raise InvalidTrajectory(f"stored experts cannot be read: {error}") from error
        if len(data) != size or not stream.eof:
            raise InvalidTrajectory(f"stored experts of {num_tokens} tokens are {size} bytes, got {len(data)}")
        return cls(stored["start"], num_routers, num_chosen, data)
