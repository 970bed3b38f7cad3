"""Replies in flight of a fake server, through pauses, aborts, new weight versions and disconnects.

A reply has one timer, whatever its length: the number of ids that are out is computed from its seconds of sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["DuplicateRequest", "FakeSampler", "Flight", "PauseMode"]

PauseMode: TypeAlias = Literal["abort", "in_place", "retract"]
HELD_POLL_S = 0.02


class DuplicateRequest(Exception):
    """A request id is in flight already."""


@dataclass(slots=True, eq=False)
class Flight:
    """A reply that is being sampled."""

    rid: str
    ids: Sequence[int]
    delay_s: float
    """The seconds before the first id."""
    token_s: float
    hangs: bool = False
    sampled_s: float = 0.0
    """The seconds of sampling until `since`."""
    since: float | None = None
    """The time from which it samples; None while it is held."""
    num_out: int = 0
    """The number of sampled ids, once it has landed."""
    changes: list[tuple[str, int]] = field(default_factory=list)
    """The version and number of ids at each change of version."""
    version: str = ""
    """The version at which it landed."""
    abort: dict[str, object] | None = None
    """The finish reason, if it was aborted."""
    dropped_from_queue: bool = False
    """True if it was aborted while it waited: such an answer has no prompt length."""
    timer: asyncio.TimerHandle | None = None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def count(self, now: float) -> int:
        """Returns the number of ids that are out at `now`."""
        if self.done.done():
            return self.num_out
        seconds = self.sampled_s + (now - self.since if self.since is not None else 0.0) - self.delay_s
        if seconds < 0.0 or self.hangs:
            return 0
        if not self.token_s:
            return len(self.ids)
        return min(int(seconds / self.token_s + 1e-6), len(self.ids))

    @property
    def total_s(self) -> float:
        """The seconds of sampling that it takes."""
        return self.delay_s + self.token_s * len(self.ids)

    def spans(self) -> list[dict[str, object]]:
        """Returns the versions as `meta_info.weight_versions` has them; an empty span if nothing is out."""
        spans: list[dict[str, object]] = []
        last = 0
        for version, end in [*self.changes, (self.version, self.num_out)]:
            end = min(end, self.num_out)
            if spans and end <= last:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": last, "end": end})
            last = end
        return spans


class FakeSampler:
    """The scheduler of a fake server; lives on one event loop."""

    def __init__(self, version: str = "default") -> None:
        self.version = version
        self.paused: PauseMode | None = None
        self.flights: dict[str, Flight] = {}
        """The replies that are being sampled, by request id."""
        self._waiting: set[str] = set()
        """The requests that came during a pause or an update: no abort reaches them, as on the real server."""
        self._writers = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        """The number of replies that are being sampled or waiting to be."""
        return len(self.flights) + len(self._waiting)

    async def admit(self, flight: Flight) -> None:
        """Waits until sampling is allowed, then begins; raises DuplicateRequest."""
        rid = flight.rid
        if rid in self.flights or rid in self._waiting:
            raise DuplicateRequest(f"Duplicate request ID detected: {rid}")
        if not self._gate.is_set():
            self._waiting.add(rid)
            try:
                while not self._gate.is_set():
                    await self._gate.wait()
            finally:
                self._waiting.discard(rid)
        self.flights[rid] = flight
        self._idle.clear()
        self._go_on(flight)

    async def land(self, flight: Flight) -> None:
        """Waits until the reply is out or aborted."""
        try:
            if not flight.done.done():
                await flight.done
        finally:
            self._leave(flight)

    async def pieces(self, flight: Flight) -> AsyncIterator[int]:
        """Yields the number of ids that are out, one by one as they come, until the reply is out or aborted."""
        loop, seen = asyncio.get_running_loop(), 0
        try:
            while not flight.done.done():
                wait_s = HELD_POLL_S
                if flight.since is not None and not flight.hangs:
                    due_s = flight.delay_s + (seen + 1) * flight.token_s - flight.sampled_s
                    wait_s = max(0.0, flight.since + due_s - loop.time())
                await asyncio.wait({flight.done}, timeout=wait_s)
                now = flight.count(loop.time())
                while seen < min(now, len(flight.ids) - 1):
                    seen += 1
                    yield seen
            while seen < flight.num_out - 1:
                seen += 1
                yield seen
        finally:
            self._leave(flight)

    def abort(self, rid: str, *, everything: bool = False) -> int:
        """Aborts a request, and every one whose id begins with its id; returns their number.

        An id that no request in flight has does nothing, and so does an empty one. While requests are held in place, an
        abort takes effect when they go on.
        """
        if not everything and rid not in self.flights:
            return 0
        ended = [flight for flight in self.flights.values() if everything or flight.rid.startswith(rid)]
        for flight in ended:
            if self.paused == "retract":
                flight.abort = {"type": "abort", "message": "Abort in waiting queue"}
                flight.dropped_from_queue = True
            else:
                flight.abort = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            if self.paused != "in_place":
                self._finish(flight)
        return len(ended)

    def pause(self, mode: PauseMode) -> None:
        """Stops sampling; requests that come wait for `resume`."""
        if mode == "abort":
            self.abort("", everything=True)
        now = asyncio.get_running_loop().time()
        for flight in self.flights.values():
            self._hold(flight, now)
        self.paused = mode
        self._settle()

    def resume(self) -> None:
        """Continues sampling."""
        self.paused = None
        for flight in list(self.flights.values()):
            if flight.abort is not None:
                self._finish(flight)
            else:
                self._go_on(flight)
        self._settle()

    async def running(self) -> None:
        """Waits until sampling is not paused."""
        await self._gate.wait()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Enters the context of a weight update: at once while paused, else when everything in flight has landed."""
        if self.paused is not None:
            yield
            return
        self._writers += 1
        self._settle()
        try:
            await self._idle.wait()
            yield
        finally:
            self._writers -= 1
            self._settle()

    def set_version(self, version: str) -> None:
        """Sets the version of the ids from now on."""
        if version == self.version:
            return
        now = asyncio.get_running_loop().time()
        for flight in self.flights.values():
            if num_out := flight.count(now):
                flight.changes.append((self.version, num_out))
        self.version = version

    def can_flush(self) -> bool:
        """Returns True if nothing uses the cache: no request in flight, or all of them retracted."""
        return not self.flights or self.paused == "retract"

    def _settle(self) -> None:
        if self.paused is None and not self._writers:
            self._gate.set()
        else:
            self._gate.clear()

    def _hold(self, flight: Flight, now: float) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
            flight.timer = None
        if flight.since is not None:
            flight.sampled_s += now - flight.since
            flight.since = None

    def _go_on(self, flight: Flight) -> None:
        loop = asyncio.get_running_loop()
        flight.since = loop.time()
        if flight.hangs:
            return
        left_s = flight.total_s - flight.sampled_s
        if left_s <= 0.0:
            self._finish(flight)
        else:
            flight.timer = loop.call_later(left_s, self._finish, flight)

    def _finish(self, flight: Flight) -> None:
        if flight.done.done():
            return
        now = asyncio.get_running_loop().time()
        flight.num_out = len(flight.ids) if flight.abort is None and not flight.hangs else flight.count(now)
        flight.version = self.version
        if flight.timer is not None:
            flight.timer.cancel()
        flight.done.set_result(None)

    def _leave(self, flight: Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
        self.flights.pop(flight.rid, None)
        if not self.flights:
            self._idle.set()
