"""Limits of one length behind one timer: each ends when it is due, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from virtual_time import VirtualTimeLoop, run_in_virtual_time

from agentgym.rollout.hosting.deadlines import Deadlines


async def work(deadlines: Deadlines, begins_s: float, takes_s: float) -> float:
    """The seconds on the clock when it ended, negative when its limit did."""
    await asyncio.sleep(begins_s)
    clock = asyncio.get_running_loop().time
    try:
        async with deadlines.limit():
            await asyncio.sleep(takes_s)
    except TimeoutError:
        return -clock()
    return clock()


def test_each_ends_when_its_own_limit_is_over() -> None:
    async def main() -> list[float]:
        deadlines = Deadlines(10.0)
        works = [(0.0, 99.0), (1.0, 2.0), (1.0, 99.0), (1.0, 9.5), (4.0, 99.0), (30.0, 10.5)]
        return await asyncio.gather(*(work(deadlines, begins_s, takes_s) for begins_s, takes_s in works))

    assert run_in_virtual_time(main()) == pytest.approx([-10.0, 3.0, -11.0, 10.5, -14.0, -40.0])


def test_thousands_share_a_timer() -> None:
    class CountingLoop(VirtualTimeLoop):
        num_timers = 0

        def call_at(self, when: float, callback: Callable[..., object], *args: Any, **keywords: Any) -> Any:
            self.num_timers += 1
            return super().call_at(when, callback, *args, **keywords)  # type: ignore[arg-type]

    async def held(deadlines: Deadlines, gate: asyncio.Event) -> None:
        async with deadlines.limit():
            await gate.wait()

    async def main() -> None:
        deadlines, gate = Deadlines(600.0), asyncio.Event()
        tasks = [asyncio.ensure_future(held(deadlines, gate)) for _ in range(2_000)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())
        loop = runner.get_loop()
    assert isinstance(loop, CountingLoop)
    assert loop.num_timers == 1


def test_a_cancellation_from_outside_is_no_time_out() -> None:
    async def main() -> None:
        playing = asyncio.ensure_future(work(Deadlines(10.0), 0.0, 99.0))
        await asyncio.sleep(5.0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run_in_virtual_time(main())


def test_an_error_inside_stays_what_it_is() -> None:
    async def main() -> None:
        async with Deadlines(10.0).limit():
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run_in_virtual_time(main())


def test_the_next_event_loop_begins_anew() -> None:
    """A run that ended while others were live leaves nothing that the next one waits for."""
    deadlines = Deadlines(10.0)

    async def leave() -> None:
        left = asyncio.ensure_future(work(deadlines, 0.0, 99.0))
        await asyncio.sleep(1.0)
        left.cancel()

    run_in_virtual_time(leave())
    assert run_in_virtual_time(work(deadlines, 0.0, 99.0)) == pytest.approx(-10.0)
    assert run_in_virtual_time(work(deadlines, 0.0, 9.0)) == pytest.approx(9.0)
