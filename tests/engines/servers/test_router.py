"""A session stays where its prefix is, and leaves a replica that is dead or far behind."""

from __future__ import annotations

import heapq
import random

import pytest

from agentgym.engines.servers.router import ReplicaRouter
from agentgym.errors import ConfigError, EngineError


def play(router: ReplicaRouter, latency_s: list[float], *, num_sessions: int, num_requests: int) -> list[int]:
    """Requests of sessions that ask again as soon as they are answered, on replicas that take about `latency_s`;
    the number of requests that each replica answered."""
    rng = random.Random(0)
    answered = [0] * len(latency_s)
    flights: list[tuple[float, int, int, float]] = []

    def ask(session: int, now: float) -> None:
        index = router.acquire(f"s{session}")
        heapq.heappush(flights, (now + latency_s[index] * rng.lognormvariate(0.0, 0.5), session, index, now))

    for session in range(num_sessions):
        ask(session, 0.0)
    for _ in range(num_requests):
        now, session, index, begin = heapq.heappop(flights)
        router.release(index, now - begin)
        answered[index] += 1
        ask(session, now)
    return answered


def test_sessions_are_spread_evenly() -> None:
    router = ReplicaRouter(3)
    homes = [router.acquire(f"s{n}") for n in range(9)]
    assert sorted(homes) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_session_stays_when_load_is_balanced() -> None:
    router = ReplicaRouter(2)
    answered = play(router, [1.0, 1.0], num_sessions=64, num_requests=5000)
    assert router.num_moved <= 0.05 * 5000
    assert min(answered) > 2000


def test_sessions_leave_a_replica_that_is_five_times_slower() -> None:
    router = ReplicaRouter(2)
    slow, fast = play(router, [5.0, 1.0], num_sessions=64, num_requests=5000)
    assert router.num_moved > 0
    assert fast > 6 * slow, "pinned sessions alone would give five to one"


def test_sessions_of_a_dead_replica_move_and_stay_where_they_moved() -> None:
    router = ReplicaRouter(2)
    homes = {f"s{n}": router.acquire(f"s{n}") for n in range(8)}
    for home in homes.values():
        router.release(home, 1.0)
    router.mark(0, alive=False)
    assert {router.acquire(session) for session in homes} == {1}
    router.mark(0, alive=True)
    assert {router.acquire(session) for session in homes} == {1}
    assert router.alive == [0, 1]


def test_all_dead_is_an_engine_error() -> None:
    router = ReplicaRouter(1)
    router.mark(0, alive=False)
    with pytest.raises(EngineError, match="no server is left that answers"):
        router.acquire("s")


def test_forgetting_a_session_that_was_never_seen_is_harmless() -> None:
    router = ReplicaRouter(2)
    router.forget("s")
    assert router.acquire("s") in (0, 1)


def test_a_router_without_replicas_and_a_margin_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 replica"):
        ReplicaRouter(0)
    with pytest.raises(ConfigError, match="margin"):
        ReplicaRouter(1, margin=0.5)
