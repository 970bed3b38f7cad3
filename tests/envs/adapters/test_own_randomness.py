"""Foreign code draws from a stream of its own, and leaves the process's random numbers as they were."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from agentgym.envs.adapters.own_randomness import OwnRandomness


def draws(seed: int) -> list[float]:
    own = OwnRandomness()
    with own.seeded(seed):
        drawn = [random.random(), float(np.random.random())]
    for _ in range(20):
        with own.again():
            drawn += [random.random(), float(np.random.random())]
    return drawn


def test_a_stream_goes_on_where_it_stopped() -> None:
    random.seed(7)
    wanted = [random.random() for _ in range(21)]
    assert draws(7)[::2] == wanted
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
