"""Ends a run whose environment holds the interpreter, so that no time-out, other episode or Ctrl-C can run.

Python code of this process cannot notice that, so a separate process does (`watchdog_process.py`). It reads a board in
shared memory: a count that a thread increments as long as threads can run, and the calls of environments.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from agentgym.rollout.hosting.watchdog_process import COUNT, ENDING, SLOT
from agentgym.tools.calling.worker import AROUND_CALLS

__all__ = ["named_call", "watch_call", "watch_calls"]

T = TypeVar("T")

NUM_SLOTS, FEW_SLOTS = 4095, 63
"""The number of calls on the board, and the number if the process may write only small files (`ulimit -f`)."""
_PROCESS = Path(__file__).with_name("watchdog_process.py")
_active: Watchdog | None = None
_UNWATCHED = nullcontext()


@contextmanager
def watch_calls(limit_s: float | None, report: int | None = None) -> Iterator[None]:
    """Watches the calls of environments, which may hold the interpreter for `limit_s` seconds; None watches nothing.

    With the number of a file, the report goes there, as JSON, for the process that started this one; and a call that
    outlives that process has a few seconds left.
    """
    global _active
    if limit_s is None or _active is not None or not hasattr(signal, "SIGRTMIN"):
        yield
        return
    watchdog = _active = Watchdog(limit_s, report)
    try:
        yield
    finally:
        _active = None
        watchdog.close()


def named_call(label: Callable[[], str], function: Callable[[], T]) -> Callable[[], T]:
    """Returns a function whose calls the watchdog knows by the label; unchanged if nothing is watched."""
    watchdog = _active
    if watchdog is None:
        return function

    def call() -> T:
        with watchdog.calling(label()):
            return function()

    return call


def watch_call(label: Callable[[], str]) -> AbstractContextManager[None]:
    """Registers the call of this thread with the watchdog under its label, inside the context."""
    return _UNWATCHED if _active is None else _active.calling(label())


class Watchdog:
    """The process that watches this one, and the board that it reads."""

    def __init__(self, limit_s: float, report: int | None = None) -> None:
        board, stacks = self._files = os.memfd_create("agentgym-calls"), os.memfd_create("agentgym-stacks")
        num_slots = NUM_SLOTS
        try:
            os.truncate(board, SLOT.size * (NUM_SLOTS + 1))
        except OSError:
            num_slots = FEW_SLOTS
            os.truncate(board, SLOT.size * (FEW_SLOTS + 1))
        self._board = mmap.mmap(board, 0)
        self._free = list(range(1, num_slots + 1))
        self._number = signal.SIGRTMIN + 9
        faulthandler.register(self._number, file=stacks, all_threads=True)
        reports = () if report is None else (report,)
        words = [os.getpid(), board, stacks, limit_s, int(self._number), *reports]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # a signal waits until the process can take it
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROCESS), *map(str, words)],
                stdin=subprocess.PIPE,
                pass_fds=(*self._files, *reports),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._over = threading.Event()
        self._beating = threading.Thread(
            target=self._beat, args=(min(1.0, limit_s / 20),), name="agentgym-heartbeat", daemon=True
        )
        self._beating.start()

    @contextmanager
    def calling(self, label: str) -> Iterator[None]:
        """Keeps a call of this thread on the board inside the context, and the calls that a `Worker` runs for it."""
        if not self._free:
            yield
            return
        around = AROUND_CALLS.set(lambda: self.calling(label))
        slot = self._free.pop()
        SLOT.pack_into(
            self._board, slot * SLOT.size, threading.get_native_id(), threading.get_ident(), label.encode()[:240]
        )
        try:
            yield
        finally:
            AROUND_CALLS.reset(around)
            SLOT.pack_into(self._board, slot * SLOT.size, 0, 0, b"")
            self._free.append(slot)

    def close(self) -> None:
        """Ends the process; the board is freed with the last call on it."""
        self._over.set()
        self._beating.join()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        faulthandler.unregister(self._number)
        for file in self._files:
            os.close(file)

    def _beat(self, every_s: float) -> None:
        count = 0
        while not self._over.wait(every_s):
            count += 1
            COUNT.pack_into(self._board, 0, count)
