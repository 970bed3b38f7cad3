"""Whether two answers in LaTeX are equal as mathematics, by math-verify, within a time limit."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path

from agentgym.errors import ConfigError, EnvironmentFault

__all__ = ["equal_answers", "math_verify_or_raise"]

PROGRAM = Path(__file__).with_name("math_equality_process.py")
START_S = 60.0
"""Seconds for SymPy to be imported, on a busy machine."""
LIMIT_S = 5.0
STARVED_S = 60.0
"""Seconds by the clock without an answer, after which the machine is at fault: it did not let the process compute."""
NUM_TRIES = 2
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
"""Signals that no answer raises, however hard it is to compare."""


def math_verify_or_raise() -> None:
    """Raises ConfigError where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("Math-v0 compares answers by math-verify: pip install 'agentgym-llm[rewards]'")


def equal_answers(gold: str, answer: str, *, limit_s: float = LIMIT_S) -> bool:
    """Whether `answer` equals `gold`; what cannot be read, or takes more than `limit_s` of computing, does not.

    All comparisons of a process go one after the other to one process beside it, which is begun again where it ended.
    One that was ended from outside, or was not let compute, has said nothing of the answer: it is asked once more, and
    then raises EnvironmentFault.
    """
    with _lock:
        for _ in range(NUM_TRIES):
            said = _asked(json.dumps([gold, answer, limit_s]), limit_s)
            if said is not None:
                return said
    raise EnvironmentFault(
        f"the process that compares answers was killed, or computed less than {limit_s:g} s in {STARVED_S:g} s, "
        f"{NUM_TRIES} times: look for what kills it, and for a machine that is overloaded"
    )


def _asked(question: str, limit_s: float) -> bool | None:
    """The verdict; None where there is none."""
    global _comparer
    comparer, _comparer = _comparer, None
    if comparer is None or comparer.owner != os.getpid():  # a fork does not share its parent's
        comparer = _Comparer()
    try:
        said = comparer.ask(question, limit_s + STARVED_S)
    except BaseException:  # its answer would be read as the next one's
        comparer.kill()
        raise
    if comparer.is_alive:
        _comparer = comparer
    return said


class _Comparer:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self.is_alive = True
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C is for us: the episodes in flight still need it
        )
        if self._line(START_S) != "ready":
            self.kill()
            raise EnvironmentFault("the process that compares answers did not start: python -c 'import math_verify'")

    def ask(self, question: str, wait_s: float) -> bool | None:
        """The verdict: False where the process ended over it, None where something else ended it or kept it from it."""
        assert self._process.stdin is not None
        was_lost = self._process.poll() is not None
        try:
            self._process.stdin.write(f"{question}\n")
        except OSError:
            was_lost = True
        line = "" if was_lost else self._line(wait_s)
        if line:
            return line == "true"
        if line is None or was_lost:
            self.kill()
            return None
        ended_by = -self._process.wait()
        self.kill()
        return None if ended_by in FROM_OUTSIDE else False

    def kill(self) -> None:
        """Ends it at once."""
        self.is_alive = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not sent cannot be
                continue

    def _line(self, limit_s: float) -> str | None:
        """A line; "" where the process has ended, None where none came in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline().strip()


_lock = threading.Lock()
_comparer: _Comparer | None = None


@atexit.register
def _end() -> None:
    if _comparer is not None and _comparer.owner == os.getpid():
        _comparer.kill()
