"""A thread for code that may hang: it runs jobs one after the other, and can be abandoned."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["WorkerThread"]


class WorkerThread:
    """A daemon thread that runs jobs in the order in which they are put.

    A job that never returns cannot be stopped. Its thread is abandoned by `stop`: it ends as soon as the job does.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread still runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """True if the caller is on this thread."""
        return threading.current_thread() is self._thread

    @property
    def num_waiting(self) -> int:
        """The approximate number of jobs that have not started."""
        return self._jobs.qsize()

    def put(self, job: Callable[[], object]) -> None:
        """Queues a job, which handles its own errors."""
        self._jobs.put(job)

    def serve_until(self, is_done: Callable[[], bool]) -> None:
        """Runs other jobs inside a job of this thread until `is_done`, which is asked after each, or `stop`."""
        while not is_done():
            job = self._jobs.get()
            if job is None:  # the thread ends after the job that waits here
                self.stop()
                return
            job()

    def stop(self) -> None:
        """Ends the thread after the jobs that were put before."""
        self._jobs.put(None)

    def join(self, wait_s: float) -> None:
        """Waits at most `wait_s` for the end of the thread."""
        self._thread.join(wait_s)


def _serve(jobs: SimpleQueue[Callable[[], object] | None]) -> None:
    """Runs a thread's jobs; it holds no reference to the WorkerThread, so a forgotten one can be collected."""
    process = os.getpid()
    while (job := jobs.get()) is not None:
        job()
        if os.getpid() != process:  # a process that the job has forked came back from it: nobody would ever end it
            os._exit(0)
        del job  # or what the last job refers to would live until the next one
