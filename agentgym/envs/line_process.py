"""`LineProcess`: a program beside this process that answers each line with a line, or is killed."""

from __future__ import annotations

import atexit
import os
import selectors
import subprocess
import sys
import threading
from pathlib import Path

from agentgym.errors import EnvironmentFault

__all__ = ["LineProcess"]

START_S = 60.0
"""Seconds for what the program imports, on a busy machine."""


class LineProcess:
    """Runs a Python file for work that may take for ever; it says `ready`, and then a line for each that it reads.

    The questions of a process go to it one after the other. It is begun at the first one, and again where it had to be
    killed. `lacks` says what is wrong where it does not start.
    """

    def __init__(self, program: Path, lacks: str) -> None:
        self._program = program
        self._lacks = lacks
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def ask(self, question: str, limit_s: float) -> str | None:
        """The line that answers; None where it did not come in time, or the program ended: then it is killed."""
        with self._lock:
            if self._running is None or self._running.owner != os.getpid():  # a fork does not share its parent's
                self._running = _Running(self._program, self._lacks)
            said = self._running.ask(question, limit_s)
            if said is None:
                self._running.kill()
                self._running = None
        return said


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
        )
        if self._line(START_S) != "ready":
            self.kill()
            raise EnvironmentFault(lacks)
        atexit.register(self._leave)

    def ask(self, question: str, limit_s: float) -> str | None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question}\n")
        except OSError:
            return None
        return self._line(limit_s)

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
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline().strip() or None
