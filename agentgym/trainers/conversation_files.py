"""Rows of JSONL and parquet files, each with where it stands; the only file here that imports pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentgym.errors import ConfigError

__all__ = ["read_rows"]

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """`("talks.jsonl, row 1", {"messages": [...]})` and so on, counted from 1; a JSONL file's rows are its lines.

    Raises ConfigError for a file that is missing, of another kind, empty or broken, naming the row.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; conversations are a .jsonl or .parquet file")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{str(path)!r} is neither .jsonl nor .parquet, as files of conversations are")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    number = 0
    for number, row in rows:
        where = f"{path}, row {number}"
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where} is an object with messages, got {type(row).__name__}")
        yield where, row
    if not number:
        raise ConfigError(f"{str(path)!r} holds no row")


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            yield from enumerate(json.loads(text), start=1)
            return
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, row {number} is not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    try:
        import pyarrow  # here, and not above: only those who have parquet files need it
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{str(path)!r} needs pyarrow: pip install 'agentgym-llm[data]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: _told(value) for name, value in row.items()}
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as parquet, behind row {number}: {error}") from error


def _told(value: object) -> object:
    """The value without the nulls of its objects: parquet gives every object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _told(one) for key, one in value.items() if one is not None}
    return [_told(one) for one in value] if isinstance(value, list) else value
