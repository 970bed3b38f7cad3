"""Programs of another interpreter, which has a library that cannot be installed beside agentgym."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from agentgym.child_guard import Kind, guard_command
from agentgym.errors import ConfigError

__all__ = ["OtherProcess", "check_python"]

ASK = "import sys, importlib.metadata as m; print(next((d.version for d in m.distributions(name=sys.argv[1])), ''))"
ASK_S = 60.0
END_S = 10.0
NUM_LINES = 5
"""The last lines that a process printed that its error shows."""
MAX_LINE = 8 << 20


class OtherProcess:
    """A guarded process; it ends with all that it started when it is closed, or when this process ends.

    `on_line` gets each line of its output, and None at the end of it. What a `server` prints as an error is output too.
    """

    def __init__(
        self,
        kind: Kind,
        command: Sequence[str],
        folders: Sequence[Path],
        on_line: Callable[[str | None], None],
    ) -> None:
        paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        programs = [str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)]
        self._last_lines: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        self._process = process = subprocess.Popen(
            guard_command(kind, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if kind == "server" else subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for this process: the episodes in flight still need it
        )
        assert process.stdout is not None
        self._errors: threading.Thread | None = None
        if process.stderr is not None:
            self._errors = _start_reading(process.stderr, self._last_lines, lambda line: None)
        errors, last_lines = self._errors, self._last_lines if kind == "server" else None

        def pass_on(line: str | None) -> None:
            if line is None and errors is not None:
                errors.join(END_S)  # what it printed is complete before its end is known
            on_line(line)

        _start_reading(process.stdout, last_lines, pass_on)
        self._sending = threading.Lock()
        self.close = weakref.finalize(self, _end, process)
        """Ends it; a second call does nothing."""

    @property
    def is_alive(self) -> bool:
        """True until it has ended."""
        return self._process.poll() is None

    @property
    def last_lines(self) -> str:
        """The end of what it printed, for an error."""
        return " | ".join(self._last_lines) or "it printed nothing"

    def send(self, line: str) -> None:
        """Writes a line to it, unless it has ended."""
        assert self._process.stdin is not None
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


@functools.cache
def check_python(python: str, library: str, version: str) -> None:
    """Raises ConfigError if the interpreter does not have the library in a version that begins with `version`."""
    get = f"python -m venv FOLDER && FOLDER/bin/pip install '{library}=={version}*', and python=FOLDER/bin/python"
    try:
        command = [python, "-I", "-c", ASK, library]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"python={python!r} is no interpreter that runs: {error}") from error
    present = asked.stdout.strip()
    if not present.startswith(version):
        raise ConfigError(f"{python} has {library} {present or '(none)'}; {version}x is read: {get}")


def _start_reading(
    stream: IO[str], last_lines: collections.deque[str] | None, on_line: Callable[[str | None], None]
) -> threading.Thread:
    """Reads a pipe on a thread, so that a process that prints much is not blocked."""

    def read() -> None:
        with contextlib.suppress(ValueError):  # closed
            while line := stream.readline(MAX_LINE):
                if last_lines is not None and line.strip():
                    last_lines.append(line.strip()[:200])
                on_line(line)
        on_line(None)

    thread = threading.Thread(target=read, name="agentgym-other-python", daemon=True)
    thread.start()
    return thread


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()  # the guard ends the program and what it started
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
