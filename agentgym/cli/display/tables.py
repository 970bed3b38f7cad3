"""Tables on standard output and bars on standard error, by rich, which is loaded when there is something to show."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from agentgym.cli.terminal import printable, terminal_width

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PLAIN_WIDTH", "progress", "show_table"]

PLAIN_WIDTH = 160
"""The width in characters of a table where there is no terminal and no COLUMNS."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints a table; cells are plain text, whatever brackets they contain."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

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
        self._label, self._total, self._num_done = label, total, done

    def __call__(self, note: str) -> None:
        before, self._num_done = self._num_done, self._num_done + 1
        of, step = (f"/{self._total}", self._total / 10) if self._total else ("", 1000)
        if before // step != self._num_done // step:
            print(f"{self._label} {self._num_done}{of} {note}".rstrip(), file=sys.stderr, flush=True)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            """Raises the error for the command's caller, which ends quietly; rich would exit with code 1."""
            raise BrokenPipeError

    return PipeConsole(
        file=stream, width=None if stream.isatty() else terminal_width(PLAIN_WIDTH), highlight=False, markup=False
    )
