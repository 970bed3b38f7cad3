"""Rows from parquet files, read in batches of the wanted columns; the only file that imports pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet

from agentgym.data.table import Table
from agentgym.errors import ConfigError

__all__ = ["open_parquet"]

MAGIC = b"PAR1"
BATCH_ROWS = 1024


def open_parquet(path: Path, limit: int | None = None) -> Table:
    """Opens the first `limit` rows of a file; raises ConfigError if it is no parquet file, or only a part of one."""
    _check_ends(path)
    with _convert_errors(path), pyarrow.parquet.ParquetFile(path) as file:
        columns, num_rows = tuple(file.schema_arrow.names), file.metadata.num_rows
    if not num_rows:
        raise ConfigError(f"{str(path)!r} has the columns {', '.join(columns) or 'none'} and no rows")

    def read(wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, object]]]:
        with _convert_errors(path), pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=BATCH_ROWS, columns=list(wanted))
            yield from islice(enumerate(row for batch in batches for row in batch.to_pylist()), limit)

    return Table(name=str(path), columns=columns, read=read)


def _check_ends(path: Path) -> None:
    with _convert_errors(path), open(path, "rb") as file:
        start = file.read(len(MAGIC))
        end = b""
        if start == MAGIC and file.seek(0, 2) >= 2 * len(MAGIC):
            file.seek(-len(MAGIC), 2)
            end = file.read()
    if not start:
        raise ConfigError(f"{str(path)!r} is empty (0 bytes)")
    if start != MAGIC:
        hint = "; it looks like JSON: name it .jsonl or .json" if start.lstrip()[:1] in (b"{", b"[") else ""
        raise ConfigError(f"{str(path)!r} is not a parquet file: it begins with {start!r}{hint}")
    if end != MAGIC:
        raise ConfigError(f"{str(path)!r} is cut off: a parquet file ends with {MAGIC!r}. Copy or write it again")


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{str(path)!r} cannot be read as a parquet file: {line}") from error
