"""Rows from parquet files, read in batches, without the keys that Arrow adds; the only file that imports pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet

from agentgym.data.table import Table
from agentgym.errors import ConfigError
from agentgym.types import JSON

__all__ = ["open_parquet", "own_cells", "struct_keys", "write_parquet"]

MAGIC = b"PAR1"
BATCH_ROWS = 1024


def open_parquet(path: Path, limit: int | None = None) -> Table:
    """Opens the first `limit` rows of a file; raises ConfigError if it is not a parquet file, or only a part of one."""
    _check_ends(path)
    with _convert_errors(path), pyarrow.parquet.ParquetFile(path) as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
    columns = tuple(schema.names)
    if not num_rows:
        raise ConfigError(f"{str(path)!r} has the columns {', '.join(columns) or 'none'} and no rows")

    def read(column_names: Sequence[str]) -> Iterator[tuple[int, dict[str, object]]]:
        with _convert_errors(path), pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=BATCH_ROWS, columns=list(column_names))
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from islice(enumerate(own_cells(row, schema, json_as_text=True) for row in rows), limit)

    return Table(name=str(path), columns=columns, read=read, keys=struct_keys(schema))


def own_cells(row: Mapping[str, object], schema: pyarrow.Schema, *, json_as_text: bool) -> dict[str, object]:
    """Returns the cells of a row as they were before Arrow, which gives every struct the keys of all rows, as null.

    Null keys of structs are left out at any depth. Nulls of columns, of lists and of JSON values stay; these values are
    still text if `json_as_text`.
    """
    kinds = dict(zip(schema.names, schema.types, strict=True))
    return {name: _own_value(value, kinds[name], json_as_text) for name, value in row.items()}


def _own_value(value: object, kind: pyarrow.DataType, json_as_text: bool) -> object:
    if json_as_text and isinstance(value, str) and isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if isinstance(value, list) and isinstance(kind, pyarrow.MapType):  # Arrow gives a list of pairs
        return {key: _own_value(item, kind.item_type, json_as_text) for key, item in value}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_own_value(item, kind.value_type, json_as_text) for item in value]
    if isinstance(value, Mapping) and isinstance(kind, pyarrow.StructType):
        kinds = {field.name: field.type for field in kind}
        return {key: _own_value(item, kinds[key], json_as_text) for key, item in value.items() if item is not None}
    return value


def struct_keys(fields: Iterable[pyarrow.Field], path: str = "") -> dict[str, tuple[str, ...]]:
    """Returns the keys of each struct that is reached without a list, by its path: `{"extra_info": ("index",)}`."""
    keys: dict[str, tuple[str, ...]] = {}
    for field in fields:
        if isinstance(field.type, pyarrow.StructType):
            inner = tuple(field.type)
            keys[path + field.name] = tuple(key.name for key in inner)
            keys |= struct_keys(inner, f"{path}{field.name}.")
    return keys


def write_parquet(path: Path, columns: Mapping[str, JSON], rows: Iterable[Mapping[str, object]]) -> int:
    """Writes rows to a file and returns their number; a batch of them is held at a time.

    A column's type is a name of Arrow's, a list of a type, or fields by name: `{"ids": ["int32"], "seed": "int64"}`.
    """
    schema = pyarrow.schema([(name, _arrow_type(kind)) for name, kind in columns.items()])
    rows, number = iter(rows), 0
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as file:
        while batch := list(islice(rows, BATCH_ROWS)):
            file.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            number += len(batch)
    return number


def _arrow_type(kind: JSON) -> pyarrow.DataType:
    if isinstance(kind, list):
        return pyarrow.list_(_arrow_type(kind[0]))
    if isinstance(kind, Mapping):
        return pyarrow.struct([(name, _arrow_type(field)) for name, field in kind.items()])
    return pyarrow.type_for_alias(kind)


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
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: of a JSON value
        line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{str(path)!r} cannot be read as a parquet file: {line}") from error
