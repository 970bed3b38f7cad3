"""The output of commands: results to standard output, progress, warnings and errors to standard error."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

from agentgym.types import JSON

__all__ = ["accept_any_text", "explain_zero", "fail", "json_alone", "printable", "say", "show_json", "warnings_shown"]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of text, which could then read as what it is not."""


def accept_any_text() -> None:
    """Has the standard streams spell out what their encoding lacks (`\\u2615`), and read UTF-8 in place of ASCII."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):  # it has been read from
                stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def say(text: str = "") -> None:
    """Prints one line of a result, with its control characters spelled out."""
    print(printable(text), flush=True)


def printable(text: str) -> str:
    """Returns the text with every control character spelled out (`\\x1b`, `\\u202e`), except line ends and tabs.

    An environment's or a model's text can then not move the cursor, clear the screen or set the window's title.
    """
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}" if match[0] < "\u0100" else ascii(match[0])[1:-1], text)


def explain_zero(success: float | None) -> None:
    """Prints where the causes of a success of 0 are listed; nothing for another one, or for None."""
    if success == 0.0:
        say("success is 0: docs/success_stays_zero.md lists the causes, each with the command that shows it")


def fail(text: str) -> None:
    """Prints `error: ...` on standard error."""
    sys.stdout.flush()
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)


_json_stream: list[TextIO] = []
"""Standard output while `json_alone` keeps it for JSON."""


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Keeps standard output for `show_json`: what else a command prints goes to standard error."""
    _json_stream.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _json_stream.pop()


def show_json(value: Mapping[str, JSON]) -> None:
    """Prints one JSON object as one line: the standard output of a command that was given `--json`."""
    stream = _json_stream[-1] if _json_stream else sys.stdout
    print(json.dumps(value, allow_nan=False, default=dict), file=stream, flush=True)


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Shows the package's warnings as `warning: ...` on standard error while a command runs.

    Messages on the data that was read are shown as `data: ...`.
    """
    handler = _Warnings()
    logger, data = logging.getLogger("agentgym"), logging.getLogger("agentgym.data")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    level = data.level
    data.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        data.setLevel(level)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record as it is: a bar that is on the screen moves below it."""
        kind = "data" if record.levelno == logging.INFO else record.levelname.lower()
        print(f"{kind}: {printable(record.getMessage())}", file=sys.stderr, flush=True)
