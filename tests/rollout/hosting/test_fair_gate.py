"""A pass of the event loop continues a few episodes, in order, whichever of them are cancelled."""

from __future__ import annotations

import asyncio

from agentgym.rollout.hosting.fair_gate import FairGate


async def passes_of(gate: FairGate, number: int, cancelled: frozenset[int] = frozenset()) -> dict[int, int]:
    """The pass of the event loop in which each of so many tasks, ready at once, was admitted."""
    now, admitted = 0, {}

    async def wait(index: int) -> None:
        await gate.wait_turn()
        admitted[index] = now

    tasks = [asyncio.create_task(wait(index)) for index in range(number)]
    await asyncio.sleep(0)
    for index in cancelled:
        tasks[index].cancel()
    while not all(task.done() for task in tasks):
        now += 1
        await asyncio.sleep(0)
    return admitted


def test_so_many_are_admitted_in_each_pass_in_the_order_in_which_they_came() -> None:
    admitted = asyncio.run(passes_of(FairGate(4), 18))
    assert list(admitted) == list(range(18))
    first = admitted[0]
    assert list(admitted.values()) == [first + index // 4 for index in range(18)]


def test_a_cancelled_one_takes_no_place_and_the_gate_serves_another_event_loop() -> None:
    gate = FairGate(4)
    cancelled = frozenset({0, 1, 2, 7})
    assert set(asyncio.run(passes_of(gate, 18, cancelled))) == set(range(18)) - cancelled

    async def leave() -> None:
        for _ in range(50):
            asyncio.get_running_loop().create_task(gate.wait_turn())
        await asyncio.sleep(0)

    asyncio.run(leave())  # its end cancels them all
    assert len(asyncio.run(asyncio.wait_for(passes_of(gate, 18), 5))) == 18
