"""A server that gives a GPU's memory to the learner on the same GPU while nothing is sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["ServerSleep"]


class ServerSleep:
    """The memory that one server has released.

    `release` frees the GPU's memory of all `parts`, of which weights are kept in the CPU's; `regain` takes some back.
    """

    def __init__(
        self,
        release: Callable[[], Awaitable[None]],
        regain: Callable[[Sequence[str]], Awaitable[None]],
        *,
        parts: Sequence[str],
    ) -> None:
        self._release, self._regain, self._parts = release, regain, tuple(parts)
        self._released: tuple[str, ...] = ()
        self._num_requests = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keeps the server from sleeping while a request is in flight, whose cache it would lose."""
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    async def begin(self) -> None:
        """Releases memory, unless requests are in flight or it is released already."""
        if not self._num_requests and not self._released:
            await self._release()
            self._released = self._parts

    async def end(self, *parts: str) -> None:
        """Takes back the memory of these parts, or of all, as far as it is released."""
        parts_back = [part for part in self._released if part in parts or not parts]
        if parts_back:
            await self._regain(parts_back)
            self._released = tuple(part for part in self._released if part not in parts_back)
