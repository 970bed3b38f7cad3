"""The collector's settings while many episodes play, and after."""

from __future__ import annotations

import gc

import pytest

from agentgym.rollout.garbage import young_garbage_only


def test_looks_at_older_objects_wait_and_the_settings_come_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), young_garbage_only():
        assert gc.get_threshold()[0] == before[0]
        assert min(gc.get_threshold()[1:]) > 1_000_000
        raise RuntimeError
    assert gc.get_threshold() == before


def test_an_object_that_lives_is_looked_at_once() -> None:
    looked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with young_garbage_only():
            _ = [[number] for number in range(20_000)]
    finally:
        gc.callbacks.remove(note)
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
