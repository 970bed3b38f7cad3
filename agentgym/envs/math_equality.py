"""Whether two answers in LaTeX are equal as mathematics, by math-verify, within a time limit."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
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


def math_verify_or_raise() -> None:
    """Raises ConfigError where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("Math-v0 compares answers by math-verify: pip install 'agentgym-llm[rewards]'")


def equal_answers(gold: str, answer: str, *, limit_s: float = LIMIT_S) -> bool:
    """Whether `answer` equals `gold`; what cannot be read, or takes longer than `limit_s`, does not.

    All comparisons of a process go one after the other to one process beside it, which is begun again where it had to
    be killed.
    """
    global _comparer
    with _lock:
        if _comparer is None or _comparer.owner != os.getpid():  # a fork does not share its parent's
            _comparer = _Comparer()
        said = _comparer.ask(json.dumps([gold, answer]), limit_s)
        if said is None:
            _comparer.kill()
            _comparer = None
    return said == "true"


class _Comparer:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        if self._line(START_S) != "ready":
            self.kill()
            raise EnvironmentFault("the process that compares answers did not start: python -c 'import math_verify'")

    def ask(self, question: str, limit_s: float) -> str | None:
        """The line that answers; None where it did not come in time, or the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question}\n")
        except OSError:
            return None
        return self._line(limit_s)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not sent cannot be
                continue

    def _line(self, limit_s: float) -> str | None:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline().strip() or None


_lock = threading.Lock()
_comparer: _Comparer | None = None
