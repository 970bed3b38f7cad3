"""The choice of a session's replica: the one that has its prefix, unless that one is much slower."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.errors import ConfigError, EngineError

__all__ = ["ReplicaRouter"]

_MEMORY = 0.9
"""The weight of the past in the running means of latency and load."""
_ROUGH = 5
"""The number of answers of a replica before its measured latency counts."""


@dataclass(slots=True)
class _Load:
    """The measured load of one replica."""

    alive: bool = True
    num_in_flight: int = 0
    num_sessions: int = 0
    num_answers: int = 0
    latency_s: float = 0.0
    """The running mean over answers."""
    load: float = 1.0
    """The running mean of requests in flight, measured at the answers."""

    def expected_s(self) -> float:
        """Returns the seconds that one more request should take: the measured latency, scaled by the current load."""
        return self.latency_s * (self.num_in_flight + 1) / max(1.0, self.load)


class ReplicaRouter:
    """Keeps a session's requests on one replica, whose cache holds their common prefix.

    Moves the session if waiting there is expected to take over `margin` times as long as elsewhere, or if the replica
    is dead. Call `acquire` before a request, `release` after it, `forget` at the end of a session.
    """

    def __init__(self, num_replicas: int, *, margin: float = 2.0) -> None:
        if num_replicas < 1:
            raise ConfigError(f"a router needs at least 1 replica, got {num_replicas}")
        if not margin >= 1.0:
            raise ConfigError(f"margin is at least 1, got {margin}")
        self.margin = margin
        self._loads = [_Load() for _ in range(num_replicas)]
        self._home: dict[str, int] = {}
        self.num_moved = 0
        """The number of requests that did not go to the replica of their session's last one, for load or death."""

    @property
    def alive(self) -> list[int]:
        """The replicas that are not known to be dead."""
        return [index for index, load in enumerate(self._loads) if load.alive]

    def acquire(self, session: str) -> int:
        """Returns the replica for the session's next request; raises EngineError if all are dead."""
        home = self._home.get(session)
        index = self._choose(home)
        if home is None:
            self._loads[index].num_sessions += 1
        elif home != index:
            self.num_moved += 1
            self._loads[home].num_sessions -= 1
            self._loads[index].num_sessions += 1
        self._home[session] = index
        self._loads[index].num_in_flight += 1
        return index

    def release(self, index: int, latency_s: float | None = None) -> None:
        """Notes the end of a request on replica `index`, and how long it took if it was answered."""
        load = self._loads[index]
        if latency_s is not None:
            keep = min(_MEMORY, load.num_answers / (load.num_answers + 1))
            load.latency_s = keep * load.latency_s + (1 - keep) * latency_s
            load.load = keep * load.load + (1 - keep) * load.num_in_flight
            load.num_answers += 1
        load.num_in_flight -= 1

    def forget(self, session: str) -> None:
        """Ends a session; harmless for an unknown one."""
        home = self._home.pop(session, None)
        if home is not None:
            self._loads[home].num_sessions -= 1

    def mark(self, index: int, *, alive: bool) -> None:
        """Marks a replica as dead, or as back; then it starts without history."""
        load = self._loads[index]
        if alive and not load.alive:
            load.num_answers, load.latency_s, load.load = 0, 0.0, 1.0
        load.alive = alive

    def _choose(self, home: int | None) -> int:
        if len(self._loads) == 1 and self._loads[0].alive:
            return 0
        alive = self.alive
        if not alive:
            raise EngineError("no server is left that answers: each one is dead")
        at_home = home is not None and self._loads[home].alive
        if all(self._loads[index].num_answers >= _ROUGH for index in alive):
            best = min(alive, key=lambda index: (self._loads[index].expected_s(), self._loads[index].num_sessions))
            if home is None or not at_home:
                return best
            is_behind = self._loads[home].expected_s() > self.margin * self._loads[best].expected_s()
            return best if is_behind else home
        if home is not None and at_home:
            return home
        return min(alive, key=lambda index: (self._loads[index].num_sessions, self._loads[index].num_in_flight))
