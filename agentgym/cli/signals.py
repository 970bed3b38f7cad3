"""The signals that end a command: SIGTERM ends it as Ctrl-C does, with another exit code."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "INTERRUPTED",
    "TERMINATED",
    "Termination",
    "end_of_serving",
    "sigterm_as_interrupt",
]

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
TERMINATED = 128 + signal.SIGTERM
"""The exit code of a command that SIGTERM ended, in order."""


class Termination:
    """Receives SIGTERM and passes the first one on to whatever handles Ctrl-C at that moment."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal. Later ones are ignored: Slurm repeats it, and a checkpoint may be in writing."""
        if self.received:
            return
        self.received = True
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    def exit_code(self, code: int) -> int:
        """Returns the exit code of a command that returned `code`."""
        return TERMINATED if self.received and code == INTERRUPTED else code


def end_of_serving() -> asyncio.Event:
    """Returns an event that Ctrl-C and SIGTERM set, for a server of the running loop."""
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    return over


@contextmanager
def sigterm_as_interrupt() -> Iterator[Termination]:
    """Makes SIGTERM end the command as Ctrl-C does, for example with a checkpoint; in other threads, does nothing.

    A shell makes its background jobs ignore SIGINT. asyncio then passes no interrupt on, so SIGINT is blocked here
    instead of ignored.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return
    before = signal.signal(signal.SIGTERM, termination)
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, before)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
