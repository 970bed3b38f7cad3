"""Foreign code draws from a stream of its own, and leaves the process's random numbers as they were."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from agentgym.envs.adapters import own_randomness
from agentgym.envs.adapters.own_randomness import OwnRandomness


def draws(seed: int) -> list[float]:
    own = OwnRandomness()
    with own.start_stream(seed):
        drawn = [random.random(), float(np.random.random())]
    for _ in range(20):
        with own.again():
            drawn += [random.random(), float(np.random.random())]
    return drawn


def test_a_stream_goes_on_where_it_stopped() -> None:
    random.seed(7)
    expected = [random.random() for _ in range(21)]
    assert draws(7)[::2] == expected
    assert draws(7) == draws(7)
    assert draws(7) != draws(8)


def test_the_stream_of_the_process_is_not_touched() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    draws(7)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_streams_that_are_drawn_from_side_by_side_are_each_their_own() -> None:
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(draws, range(64))) == [draws(seed) for seed in range(64)]


def test_a_call_within_a_call_has_a_stream_of_its_own() -> None:
    outer, inner = OwnRandomness(), OwnRandomness()
    with outer.start_stream(7):
        first = random.random()
        with inner.start_stream(8):
            random.random()
        second = random.random()
    random.seed(7)
    assert [first, second] == [random.random(), random.random()]


def test_a_call_that_hangs_holds_up_the_others_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = draws(7)
    random.seed(1)
    before = random.getstate()
    monkeypatch.setattr(own_randomness, "MAX_S", 0.3)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        with OwnRandomness().start_stream(3):
            hangs.set()
            goes_on.wait(30)

    hanging = threading.Thread(target=hang)
    hanging.start()
    assert hangs.wait(30)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(draws, [7] * 4)) == [expected] * 4
    assert [record.getMessage()[:45] for record in caplog.records] == ["a call of an environment has taken over 0.3 s"]
    goes_on.set()
    hanging.join(30)
    assert random.getstate() == before
    assert draws(7) == expected
