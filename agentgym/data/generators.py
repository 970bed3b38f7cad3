"""Rows from a user's Python code: a generator function, a list or a data set of torch, in a module or a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from importlib import import_module
from itertools import islice
from typing import cast

from agentgym.data.table import Cells, Table, describe_value
from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault
from agentgym.loading import Wanted, load_named
from agentgym.types import Task

__all__ = ["open_generator"]

GENERATOR = Wanted(
    noun="generator of rows",
    example="function",
    hint="It is a function that yields a dict or a Task for each row.",
    fits=lambda value: callable(value) and not isinstance(value, type),
)


def open_generator(name: str, limit: int | None = None) -> Table:
    """Reads the first `limit` rows that `path/to/file.py:name` or `package.module:name` yields: dicts or Tasks.

    The rows are read before this returns, so an endless generator needs a `limit`. Raises EnvironmentFault, with the
    cause, for an exception of the user's code.
    """
    rows: list[tuple[int, Cells]] = []
    try:
        for number, row in enumerate(islice(_rows(name), limit)):
            if not isinstance(row, Mapping | Task):
                raise ConfigError(f"{name}, row {number} is a dict or a Task, got {describe_value(row)}")
            rows.append((number, row))
    except AgentGymError:
        raise
    except Exception as error:  # the boundary: the generator is user code
        line = str(error).strip().partition("\n")[0]
        raise EnvironmentFault(f"{name} raised after {len(rows)} rows: {type(error).__name__}: {line}") from error
    if not rows:
        raise ConfigError(f"{name} yields no rows")
    columns = dict.fromkeys(key for _, row in rows if isinstance(row, Mapping) for key in row)
    return Table(name=name, columns=tuple(columns), read=lambda _: rows)


def _rows(name: str) -> Iterator[object]:
    target = load_named(name, GENERATOR)
    rows = target() if callable(target) else target
    if isinstance(rows, Sized) and not isinstance(rows, Iterable) and hasattr(rows, "__getitem__"):
        return (rows[index] for index in range(len(rows)))  # a torch.utils.data.Dataset
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise ConfigError(f"{name} gives rows, dicts or Tasks, one after the other; got {describe_value(rows)}")
    if type(rows).__module__.startswith("datasets.") and hasattr(rows, "features"):
        return cast("Iterator[object]", import_module("agentgym.data.hf_datasets").own_rows(rows))
    return iter(rows)
