"""Rows from JSON lines, and from JSON files with a list of objects; both may be gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO

from agentgym.data.table import Table, describe_value
from agentgym.errors import NOT_JSON, ConfigError

__all__ = ["JSON_SUFFIXES", "open_json"]

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")


def open_json(path: Path, limit: int | None = None) -> Table:
    """Reads the first `limit` rows of a file. A `.json` file that does not begin with a list is read line by line."""
    with _open_text(path) as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        raise ConfigError(f"{str(path)!r} is empty; a JSON object on each line was wanted")
    is_list = first.lstrip().startswith("[") and ".json" in path.suffixes
    with _open_text(path) as file:
        rows = list(islice(_items(file, path) if is_list else _lines(file, path), limit))
    if not rows:
        raise ConfigError(f"{str(path)!r} is an empty list; a list of JSON objects was wanted")
    columns = dict.fromkeys(key for _, row in rows for key in row)
    return Table(name=str(path), columns=tuple(columns), read=lambda _: rows, unit="row" if is_list else "line")


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except EOFError as error:
        raise ConfigError(f"{str(path)!r} is cut off: its gzip stream has no end") from error
    except (OSError, zlib.error) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except NOT_JSON as error:
            cut = "" if line.endswith("\n") else "; it is the last line, without an end: the file may be cut off"
            what = f"{error.msg}, at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"{path}, line {number} is not JSON: {what}{cut}") from error
        yield number, _check_row(row, f"{path}, line {number}")


def _items(file: TextIO, path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    try:
        rows = json.load(file)
    except NOT_JSON as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}; the file may be cut off") from error
    for number, row in enumerate(rows):
        yield number, _check_row(row, f"{path}, row {number}")


def _check_row(row: object, where: str) -> Mapping[str, object]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a JSON object with columns, got {describe_value(row)}")
    return row
