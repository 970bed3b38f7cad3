"""Environment threads: one for a whole life, cheap, and left behind when they hang."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

from agentgym.rollout.hosting.env_code import CallOutcome
from agentgym.rollout.hosting.env_threads import EnvThread, EnvThreads, Mailbox, ThreadCall


def gather(calls: Callable[[Mailbox], list[ThreadCall[int]]]) -> list[CallOutcome[int]]:
    async def main() -> list[CallOutcome[int]]:
        new_calls = calls(Mailbox(asyncio.get_running_loop()))
        return [await call.future for call in new_calls]

    return asyncio.run(main())


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_calls_of_a_thread_run_in_order_on_that_thread() -> None:
    thread, ran = EnvThread("test"), []
    outcomes = gather(
        lambda box: [thread.submit(lambda: ran.append(threading.get_ident()) or len(ran), box) for _ in range(50)]
    )
    thread.stop()
    assert outcomes == [(None, number) for number in range(1, 51)]
    assert len(set(ran)) == 1
    assert ran[0] != threading.get_ident()


def test_what_a_future_would_refuse_comes_back_as_well() -> None:
    def fail(error: BaseException) -> int:
        raise error

    thread = EnvThread("test")
    errors = [StopIteration(), SystemExit(1), ValueError("x"), KeyboardInterrupt(), GeneratorExit()]
    outcomes = gather(lambda box: [thread.submit(lambda error=error: fail(error), box) for error in errors])
    thread.stop()
    assert [outcome[0] for outcome in outcomes] == errors


def test_idle_threads_are_used_again_and_end_with_the_pool() -> None:
    threads = EnvThreads()
    first, second = threads.acquire(), threads.acquire()
    assert first is not second
    threads.release(first)
    assert threads.acquire() is first
    threads.release(first)
    threads.release(second)
    threads.close()
    wait_until(lambda: not (first.alive or second.alive))


def test_a_forgotten_pool_ends_its_threads() -> None:
    threads = EnvThreads()
    thread = threads.acquire()
    threads.release(thread)
    del threads
    gc.collect()
    wait_until(lambda: not thread.alive)


def test_pinned_environments_spread_over_the_given_threads() -> None:
    threads = EnvThreads(3)
    acquired = [threads.acquire() for _ in range(9)]
    assert sorted(acquired.count(thread) for thread in set(acquired)) == [3, 3, 3]
    threads.release(acquired[0])
    assert threads.acquire() is acquired[0]
    threads.close()


def test_an_abandoned_thread_counts_until_its_call_returns_and_refuses_more() -> None:
    threads, gate = EnvThreads(1), threading.Event()
    thread = threads.acquire()

    async def main() -> CallOutcome[int]:
        box = Mailbox(asyncio.get_running_loop())
        thread.submit(gate.wait, box)
        threads.abandon(thread)
        return await thread.submit(lambda: 1, box).future

    error, _ = asyncio.run(main())
    assert "stuck in another environment" in str(error)
    assert threads.num_leaked == 1
    assert threads.acquire() is not thread
    gate.set()
    wait_until(lambda: threads.num_leaked == 0)
    threads.close()
