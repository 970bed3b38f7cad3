"""A thread for user code ends what the code leaves behind."""

from __future__ import annotations

import os
import signal
import time
from queue import SimpleQueue

from agentgym.tools.calling.worker_thread import WorkerThread


def test_a_forked_process_that_returns_from_its_job_ends() -> None:
    children: SimpleQueue[int] = SimpleQueue()
    thread = WorkerThread("forks")
    thread.put(lambda: children.put(os.fork()))
    child, deadline = children.get(timeout=20), time.monotonic() + 20
    try:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline, "the child waits for a job that nobody gives it"
            time.sleep(0.01)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        thread.stop()
