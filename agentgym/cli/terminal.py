"""The output of commands: results to standard output, progress, warnings and errors to standard error."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from agentgym.errors import describe_error
from agentgym.types import JSON

__all__ = [
    "accept_any_text",
    "explain_zero",
    "fail",
    "json_alone",
    "printable",
    "say",
    "show_json",
    "terminal_width",
    "warnings_shown",
]

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
        say("success is 0: `agentgym docs success_stays_zero` lists the causes, each with the command that shows it")


def fail(text: str) -> None:
    """Prints `error: ...` on standard error; with `--json`, the first such text is the object's `error`."""
    sys.stdout.flush()
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)
    for output in _json_outputs[-1:]:
        output.error = output.error or text


@dataclass
class _JsonOutput:
    """Standard output while `json_alone` keeps it for JSON."""

    stream: TextIO
    error: str = ""
    is_written: bool = False


_json_outputs: list[_JsonOutput] = []


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Keeps standard output for `show_json`: what else a command prints goes to standard error.

    A command that fails without a result writes `{"error": ...}`.
    """
    output = _JsonOutput(sys.stdout)
    _json_outputs.append(output)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except BaseException as error:
        output.error = output.error or describe_error(error)
        raise
    finally:
        if output.error and not output.is_written:
            show_json({})
        _json_outputs.pop()


def show_json(value: Mapping[str, JSON]) -> None:
    """Prints one JSON object as one line: the standard output of a command that was given `--json`."""
    output = _json_outputs[-1] if _json_outputs else _JsonOutput(sys.stdout)
    if output.error:
        value = {"error": output.error, **value}
    text = json.dumps(value, allow_nan=False, default=dict)
    output.is_written = True
    print(text, file=output.stream, flush=True)


def terminal_width(otherwise: int = 80) -> int:
    """Returns COLUMNS, or the width of the terminal that output, errors or input are at, or `otherwise` without one."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    for stream in (sys.__stdout__, sys.__stderr__, sys.__stdin__):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # none, closed, or no terminal
            if width := os.get_terminal_size(stream.fileno()).columns:  # type: ignore[union-attr]
                return width
    return otherwise


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
