"""`LineProcess`: a program in its own process that answers each line with a line, and may end over one."""

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
"""The seconds that the program's imports may take on a busy machine."""
STARVED_S = 60.0
"""The wall-clock seconds without an answer after which the machine is at fault: it gave the program no CPU time."""
NUM_TRIES = 2  # a program that was ended from outside gave no verdict
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
"""The signals that come from outside: no question causes them, however hard it is to answer."""


class LineProcess:
    """Runs a Python file for work that may never end; it writes `ready`, and then a line for each that it reads.

    The program ends itself if a question takes too much CPU time; wall-clock time would depend on how busy the machine
    is. The questions of a process are asked one after the other. The program is started at the first question, and
    restarted after it has ended. `lacks` is the error message if it does not start.
    """

    def __init__(self, program: Path, lacks: str) -> None:
        self._program = program
        self._lacks = lacks
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def ask(self, question: str, limit_s: float) -> str | None:
        """Returns the answer, or None if the program ended over the question. `limit_s` is its CPU time in seconds.

        A program that was ended from outside, or got no CPU time, gave no verdict: it is asked once more, and then
        EnvironmentFault is raised.
        """
        with self._lock:
            for _ in range(NUM_TRIES):
                try:
                    return self._ask_once(question, limit_s + STARVED_S)
                except _Lost:
                    continue
        raise EnvironmentFault(
            f"{self._program.name} was killed, or computed less than {limit_s:g} s in {STARVED_S:g} s, "
            f"{NUM_TRIES} times: look for what kills it, and for a machine that is overloaded"
        )

    def _ask_once(self, question: str, wait_s: float) -> str | None:
        running, self._running = self._running, None
        if running is None or running.owner != os.getpid():  # a forked child does not share its parent's
            running = _Running(self._program, self._lacks)
        try:
            line = running.ask(question, wait_s)
        except BaseException:  # its answer would be read as the next question's
            running.kill()
            raise
        if line is None:
            running.kill()
        else:
            self._running = running
        return line


class _Lost(Exception):
    """The program was ended by something other than the question, or got no CPU time."""


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
            start_new_session=True,  # Ctrl-C is for this process: the episodes in flight still need it
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
            except OSError:  # unsent text cannot be sent now
                continue

    def _leave(self) -> None:
        if self.owner == os.getpid():
            self.kill()

    def _line(self, limit_s: float) -> str | None:
        """Reads a line; "" if the program has ended, None if none came in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline().strip()
