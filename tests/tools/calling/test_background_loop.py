"""A loop on a thread of its own: one for all who ask, and a new one in a forked child."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time

import pytest

from agentgym.tools.calling.background_loop import BackgroundLoop


async def thread_name() -> str:
    return threading.current_thread().name


def test_threads_that_ask_first_at_once_get_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundLoop("agentgym-test")
    pid, loops = os.getpid(), []
    late = threading.Event()

    def slow() -> int:
        """A system that holds a thread up where it asks for the process."""
        if threading.current_thread().name == "late":
            late.set()
            time.sleep(0.1)
        return pid

    monkeypatch.setattr(os, "getpid", slow)
    second = threading.Thread(target=lambda: loops.append(background.loop), name="late")
    second.start()
    late.wait(0.05)
    loops.append(background.loop)
    second.join()
    assert loops[0] is loops[1]
    background.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    background = BackgroundLoop("agentgym-test")
    assert background.submit(thread_name()).result() == "agentgym-test"

    def child(queue: multiprocessing.Queue[str]) -> None:
        queue.put(background.submit(thread_name()).result(10))

    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    forked = context.Process(target=child, args=(queue,))
    forked.start()
    assert queue.get(timeout=20) == "agentgym-test"
    forked.join()
    assert not background.is_current and asyncio.run(_is_current(background))
    background.close()


def test_a_closed_loop_has_no_thread_and_the_next_use_starts_another() -> None:
    background = BackgroundLoop("agentgym-test-closed")
    before = background.loop
    background.close()
    assert before.is_closed()
    assert "agentgym-test-closed" not in {thread.name for thread in threading.enumerate()}
    assert background.submit(thread_name()).result() == "agentgym-test-closed"
    background.close()
    background.close()


async def _is_current(background: BackgroundLoop) -> bool:
    async def there() -> bool:
        return background.is_current

    return await asyncio.wrap_future(background.submit(there()))
