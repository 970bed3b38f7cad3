"""The collector's settings while many episodes play, and after."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from agentgym.rollout.hosting.gc_pause import EVERY, FullCollections, young_garbage_only


def test_looks_at_older_objects_wait_and_the_settings_come_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), young_garbage_only():
        assert gc.get_threshold()[0] == before[0]
        assert min(gc.get_threshold()[1:]) > 1_000_000
        raise RuntimeError
    assert gc.get_threshold() == before


@contextmanager
def noting(note: Callable[[str, dict[str, int]], None]) -> Iterator[None]:
    """Tells `note` of the begin and end of each collection."""
    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


def test_an_object_that_lives_is_looked_at_once() -> None:
    looked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(info["generation"])

    with noting(note), young_garbage_only():
        _ = [[number] for number in range(20_000)]
    assert len(looked) > 20
    assert set(looked) == {0}


def test_young_garbage_is_still_collected() -> None:
    class Node:
        count = 0

        def __del__(self) -> None:
            Node.count += 1

    with young_garbage_only():
        for _ in range(20_000):
            node = Node()
            node.me = node  # type: ignore[attr-defined]
    assert Node.count > 10_000


class SlowCollections:
    """A clock on which a full collection takes 4 seconds, and nothing else takes any."""

    def __init__(self) -> None:
        self.now_s = 1e6
        self.collected_s: list[float] = []

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.collected_s.append(self.now_s)
            self.now_s += 4.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("update_s", "apart_s"),
    [(100.0, EVERY * 100.0), (25.0, 400.0), (10.0, 400.0), (1.0, 400.0)],
    ids=["after 16 updates", "both", "after a hundred times its seconds", "fast updates"],
)
def test_full_collections_take_a_hundredth_of_the_time_at_most(update_s: float, apart_s: float) -> None:
    clock = SlowCollections()
    with noting(clock.note), young_garbage_only():
        collections = FullCollections(lambda: clock.now_s)
        while len(clock.collected_s) < 4:
            clock.now_s += update_s
            collections.count_update()
    apart = [later - sooner - 4.0 for sooner, later in zip(clock.collected_s, clock.collected_s[1:], strict=False)]
    assert apart == [apart_s] * 3


def test_old_garbage_goes_with_a_full_collection() -> None:
    class Node:
        count = 0

        def __del__(self) -> None:
            Node.count += 1

    with young_garbage_only():
        node = Node()
        node.me = node  # type: ignore[attr-defined]
        gc.collect(0)  # it lives through its first look
        del node
        gc.collect(0)
        collections = FullCollections()
        for _ in range(EVERY - 1):
            collections.count_update()
        assert Node.count == 0
        collections.count_update()
        assert Node.count == 1
