"""The output of commands: results to standard output, progress, warnings and errors to standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentgym.types import JSON

__all__ = ["fail", "json_alone", "printable", "progress", "say", "show_json", "show_table", "warnings_shown"]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PLAIN_WIDTH = 160
"""The width in characters of a table that goes to a file or a pipe."""


def say(text: str = "") -> None:
    """Prints one line of a result, with its control characters spelled out."""
    print(printable(text), flush=True)


def printable(text: str) -> str:
    """Returns the text with every control character spelled out (`\\x1b`), except line ends and tabs.

    An environment's or a model's text can then not move the cursor, clear the screen or set the window's title.
    """
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


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


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints a table; cells are plain text, whatever brackets they contain."""
    table = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False, show_header=any(columns)
    )
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _console(sys.stdout).print(table)


@contextlib.contextmanager
def progress(label: str, total: int | None, done: int = 0) -> Iterator[Callable[[str], None]]:
    """Shows a bar on a terminal, else a line per tenth of `total`, or per thousand if there is none.

    Yields a function that counts 1, given a note.
    """
    if not sys.stderr.isatty():
        yield _PlainProgress(label, total, done)
        return
    from rich import progress as bars  # the slowest part of rich to load, and only for this

    counts = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
    columns = (bars.TextColumn(label), *counts, bars.TextColumn("{task.fields[note]}"))
    with bars.Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(label, total=total, completed=done, note="")
        yield lambda note: bar.update(task, advance=1, note=note)


class _PlainProgress:
    def __init__(self, label: str, total: int | None, done: int) -> None:
        self._label, self._total, self._done = label, total, done

    def __call__(self, note: str) -> None:
        before, self._done = self._done, self._done + 1
        of, step = (f"/{self._total}", self._total / 10) if self._total else ("", 1000)
        if before // step != self._done // step:
            print(f"{self._label} {self._done}{of} {note}".rstrip(), file=sys.stderr, flush=True)


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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises the error for the command's caller, which ends quietly; rich would exit with code 1."""
        raise BrokenPipeError


def _console(stream: TextIO) -> Console:
    return _Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, markup=False)
