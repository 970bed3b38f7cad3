"""Programs of another interpreter, which has a library that cannot be installed beside agentgym."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agentgym.child_guard import Kind, guard_command
from agentgym.errors import ConfigError

__all__ = ["OtherProcess", "check_python"]

ASK = "import sys, importlib.metadata as m; print(next((d.version for d in m.distributions(name=sys.argv[1])), ''))"
ASK_S = 60.0
END_S = 10.0
NUM_LINES = 5
"""The last lines that a process printed that its error shows."""


class OtherProcess:
    """A guarded process; it ends with all that it started when it is closed, or when this process ends.

    `on_line` gets each line that it prints, and None at the end. `folders` are those that it imports from.
    """

    def __init__(
        self, kind: Kind, command: Sequence[str], folders: Sequence[Path], on_line: Callable[[str | None], None]
    ) -> None:
        paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        programs = [str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)]
        variables = {"PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            guard_command(kind, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **variables},
            start_new_session=True,  # Ctrl-C is for this process: the episodes in flight still need it
        )
        self._last_lines: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        self._sending = threading.Lock()
        threading.Thread(target=_read, args=(self._process, self._last_lines, on_line), daemon=True).start()
        self.close = weakref.finalize(self, _end, self._process)
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
    try:
        command = [python, "-I", "-c", ASK, library]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"python={python!r} is no interpreter that runs: {error}") from error
    present = answer.stdout.strip()
    if not present.startswith(version):
        get = f"python -m venv FOLDER && FOLDER/bin/pip install '{library}=={version}*', and python=FOLDER/bin/python"
        raise ConfigError(f"{python} has {library} {present or '(none)'}; {version}x is read: {get}")


def _read(
    process: subprocess.Popen[str], last_lines: collections.deque[str], on_line: Callable[[str | None], None]
) -> None:
    """Reads both pipes, so that a process that prints much is not blocked."""

    def drain(stream: Iterable[str]) -> None:
        for line in stream:
            last_lines.append(line.strip()[:200])
            on_line(line)

    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        errors = threading.Thread(target=drain, args=(process.stderr,), daemon=True)
        errors.start()
        drain(process.stdout)
        errors.join()  # what it printed is complete before its end is known
    on_line(None)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.stdin.close()  # the guard ends the program and what it started
        process.wait(END_S)
