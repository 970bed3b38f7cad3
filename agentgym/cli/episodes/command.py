"""Prints the recorded episodes of a run, or writes them to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.episodes.conversation_text import conversation_text
from agentgym.cli.episodes.selection import Selection, chosen_lines
from agentgym.cli.episodes.table import COLUMNS, table_row
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import printable, say, show_json
from agentgym.data.sources import write_table
from agentgym.errors import ConfigError, RunFolderError
from agentgym.rollout.record import tools_file
from agentgym.rollout.record.episodes_file import EpisodeRecord, record_from_json
from agentgym.rollout.record.line_reader import FILE_NAME, LineReader, find_episodes
from agentgym.rollout.record.manifest import replacing
from agentgym.rollout.record.stored_fields import NO_EPISODE

__all__ = ["main"]

RECORDS = (FILE_NAME, tools_file.FILE_NAME, "metrics.jsonl")
"""The files of a run that grow, which this command does not replace."""
Lines = Iterator[tuple[int, bytes]]
"""The lines of episodes, each with its number."""


@dataclass(frozen=True, kw_only=True)
class EpisodesOptions(Selection):
    """Prints the recorded episodes of a run, one line of JSON each, or writes them to a file.

    Filters and --sort use an index in the cache folder, which the first such command of a run builds.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The folder of a training run, of an evaluation or of a halted step."""
    file: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[FILE]")] = None
    """The file to write: .jsonl as it was recorded, or .parquet with a row for each episode, which pandas, polars,
    DuckDB and `datasets` read; by default, lines go to standard output."""
    text: bool = False
    """Print the conversations, to be read, in place of JSON."""
    json: bool = False
    """Print one line of JSON about the file."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym episodes ...`."""
    options = parse_options(EpisodesOptions, args, prog="agentgym episodes")
    path = find_episodes(options.run)
    if path is None:
        raise RunFolderError(f"{str(options.run)!r} holds no episodes: the folder of a run was wanted")
    lines = chosen_lines(options, path) if options.is_any else _lines(path)
    if options.file is None:
        if options.json:
            raise ConfigError("--json is about a file: name one, such as episodes.parquet")
        if options.text:
            for number, record in _records(path, lines):
                print(printable(conversation_text(number, record)), flush=True)
        else:
            sys.stdout.buffer.writelines(line for _, line in lines)
        return 0
    if options.text:
        raise ConfigError("--text prints conversations: name no file, or redirect the output (> episodes.txt)")
    if options.file.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{str(options.file)!r}: a file .jsonl or .parquet was wanted")
    if options.file.name in RECORDS and options.file.resolve().parent == path.resolve().parent:
        raise ConfigError(f"{str(options.file)!r} is a name of the run's own record: give another one")
    number = _write(path, options.file, lines)
    say(f"{number} episodes: {options.file}")
    if options.json:
        show_json({"file": str(options.file), "episodes": number})
    return 0


def _write(path: Path, file: Path, lines: Lines) -> int:
    """Writes the episodes to a file that appears once it is complete; returns their number."""
    try:
        with replacing(file) as part:
            if file.suffix == ".parquet":
                return write_table(part, COLUMNS, _rows(path, lines))
            with open(part, "wb") as output:
                return sum(bool(output.write(line)) for _, line in lines)
    except OSError as error:
        raise RunFolderError(f"cannot write {str(file)!r}: {error.strerror or error}") from error


def _rows(path: Path, lines: Lines) -> Iterator[dict[str, object]]:
    """Yields the rows of the table; raises RunFolderError for an episode whose numbers fit in no column."""
    for number, record in _records(path, lines):
        try:
            yield table_row(record)
        except ValueError as error:
            raise RunFolderError(f"{str(path)!r}, line {number} fits in no table: {error}") from error


def _records(path: Path, lines: Lines) -> Iterator[tuple[int, EpisodeRecord]]:
    """Yields the episodes of lines; raises RunFolderError for a line that is none."""
    menus = tools_file.read_menus(path.parent)
    for number, line in lines:
        try:
            record = record_from_json(json.loads(line), menus)
        except NO_EPISODE as error:
            raise RunFolderError(f"{str(path)!r}, line {number} is not an episode: {error!r:.300}") from error
        yield number, record


def _lines(path: Path) -> Lines:
    """Yields the lines; an incomplete last one is left out."""
    with LineReader(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"}\n"):
                yield number, line
            elif line.endswith(b"\n"):
                raise RunFolderError(f"{str(path)!r}, line {number} is damaged: `agentgym verify` shows what is left")
