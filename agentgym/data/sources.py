"""Opens the sources of rows that a user names: files, file patterns, data sets of `datasets`, Python generators."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from os.path import expanduser, isdir
from pathlib import Path
from types import ModuleType
from typing import cast

from agentgym.data.generators import open_generator
from agentgym.data.json_files import JSON_SUFFIXES, open_json
from agentgym.data.table import Table
from agentgym.errors import ConfigError, nearest
from agentgym.extras import install_extra
from agentgym.remote import cached_files, is_remote
from agentgym.types import JSON

__all__ = ["open_sources", "write_table"]

MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
DATASET = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)*")
FORMS = (
    "a file (.parquet, .jsonl, .json, .gz of the latter two), a pattern such as 'data/*.parquet', either at an address "
    "too ('s3://bucket/*.parquet'), a folder or name of the datasets library (NAME:SPLIT, NAME:CONFIG:SPLIT), or "
    "'path/to/file.py:generator'"
)


def open_sources(names: tuple[str, ...], limit: int | None = None) -> Iterator[Table]:
    """Yields the tables of `names` in order; each has at most `limit` rows."""
    for name in names:
        if is_remote(name):
            for path in cached_files(name):
                yield replace(_open_file(path, limit), name=f"{name.rpartition('/')[0]}/{path.name}")
            continue
        for source in _expand_pattern(name):
            yield _open(source, limit)


def _expand_pattern(name: str) -> list[str]:
    if not any(mark in name for mark in "*?[") or Path(name).exists():
        return [name]
    paths = sorted(glob.glob(name, recursive=True))
    if not paths and not DATASET.fullmatch(name):
        raise ConfigError(f"no file matches {name!r}")
    return paths or [name]


def _open(name: str, limit: int | None) -> Table:
    path = Path(expanduser(name))
    if path.is_file():
        return _open_file(path, limit)
    if path.is_dir():
        return _open_dataset(str(path), [], limit)
    source, *parts = name.split(":")
    if name.rpartition(":")[0].endswith(".py"):
        return open_generator(name, limit)
    if parts and source and isdir(expanduser(source)):
        return _open_dataset(expanduser(source), parts, limit)
    if path.suffix in (".parquet", ".gz", *JSON_SUFFIXES) or path.is_absolute() or name.startswith("."):
        raise ConfigError(f"no file {name!r}{_neighbour(path)}")
    if MODULE.fullmatch(name):
        return open_generator(name, limit)
    if DATASET.fullmatch(name):
        return _open_dataset(source, parts, limit)
    raise ConfigError(f"no data at {name!r}{_neighbour(path)} Data is {FORMS}")


def _open_file(path: Path, limit: int | None) -> Table:
    if path.name.endswith(JSON_SUFFIXES):
        return open_json(path, limit)
    if path.suffix == ".parquet":
        module = _wrapper("parquet", "pyarrow", str(path))
        return cast("Table", module.open_parquet(path, limit))
    raise ConfigError(f"{str(path)!r} is not a file of a known kind. Data is {FORMS}")


def write_table(path: Path, columns: Mapping[str, JSON], rows: Iterable[Mapping[str, object]]) -> int:
    """Writes a parquet file and returns its number of rows; see `write_parquet`."""
    return cast("int", _wrapper("parquet", "pyarrow", str(path)).write_parquet(path, columns, rows))


def _open_dataset(name: str, parts: Sequence[str], limit: int | None) -> Table:
    module = _wrapper("hf_datasets", "datasets", name)
    return cast("Table", module.open_dataset(name, parts, limit))


def _wrapper(module: str, library: str, name: str) -> ModuleType:
    """Imports the module that wraps an optional library, once a file needs it."""
    try:
        return import_module(f"agentgym.data.{module}")
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        install = install_extra("data")
        raise ConfigError(f"{name!r} needs the library {library}, which is not installed: {install}") from error


def _neighbour(path: Path) -> str:
    """Returns `": did you mean 'x'?"` for a file with a similar name in the same folder."""
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {str(folder)!r}."
    near = nearest(path.name, [file.name for file in folder.iterdir()])
    return near.replace("'", f"'{folder}/" if str(folder) != "." else "'", 1) or "."
