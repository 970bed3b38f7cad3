"""`LineProcess`: a program beside this process that answers each line with a line, and may end over one."""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path

from agentgym.errors import EnvironmentFault

__all__ = ["LineProcess"]

START_S = 60.0
"""Seconds for what the program imports, on a busy machine."""
STARVED_S = 60.0
"""Seconds by the clock without an answer, after which the machine is at fault: it did not let the program compute."""
NUM_TRIES = 2
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
"""Signals that no question raises, however hard it is to answer."""


class LineProcess:
    """Runs a Python file for work that may take for ever; it says `ready`, and then a line for each that it reads.

    The program ends itself where a question takes more than it may, by what it computes and not by the clock, which
    says how busy the machine is. The questions of a process go to it one after the other. It is begun at the first
    one, and again where it ended. `lacks` says what is wrong where it does not start.
    """

    def __init__(self, program: Path, lacks: str) -> None:
        self._program = program
        self._lacks = lacks
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def ask(self, question: str, limit_s: float) -> str | None:
        """The line that answers; None where the program ended over it. `limit_s` is what the program may compute.

        One that was ended from outside, or was not let compute, has said nothing: it is asked once more, and then
        raises EnvironmentFault.
        """
        with self._lock:
            for _ in range(NUM_TRIES):
                try:
                    return self._asked(question, limit_s + STARVED_S)
                except _Lost:
                    continue
        raise EnvironmentFault(
            f"{self._program.name} was killed, or computed less than {limit_s:g} s in {STARVED_S:g} s, "
            f"{NUM_TRIES} times: look for what kills it, and for a machine that is overloaded"
        )

    def _asked(self, question: str, wait_s: float) -> str | None:
        running, self._running = self._running, None
        if running is None or running.owner != os.getpid():  # a fork does not share its parent's
            running = _Running(self._program, self._lacks)
        try:
            said = running.ask(question, wait_s)
        except BaseException:  # its answer would be read as the next one's
            running.kill()
            raise
        if said is None:
            running.kill()
        else:
            self._running = running
        return said


class _Lost(Exception):
    """The program was ended by something else than the question, or kept from it."""


class _Running:
    def __init__(self, program: Path, lacks: str) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C is for us: the episodes in flight still need it
        )
        if self._line(START_S) != "ready":
            self.kill()
            raise EnvironmentFault(lacks)
        atexit.register(self._leave)

    def ask(self, question: str, wait_s: float) -> str | None:
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            raise _Lost
        try:
            self._process.stdin.write(f"{question}\n")
        except OSError:
            raise _Lost from None
        line = self._line(wait_s)
        if line is None or (not line and -self._process.wait() in FROM_OUTSIDE):
            raise _Lost
        return line or None

    def kill(self) -> None:
        atexit.unregister(self._leave)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not sent cannot be
                continue

    def _leave(self) -> None:
        if self.owner == os.getpid():
            self.kill()

    def _line(self, limit_s: float) -> str | None:
        """A line; "" where the program has ended, None where none came in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline().strip()
