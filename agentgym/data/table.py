"""What every source of rows is read as: named columns, and numbered rows of plain JSON values."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

import numpy as np

from agentgym.errors import ConfigError
from agentgym.types import JSON, Task

__all__ = ["Cells", "Table", "kind_of", "plain"]

Cells: TypeAlias = "Mapping[str, object] | Task"
"""A row: its columns' values, or the task itself where a generator made one."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A source of rows, not yet read: `Table(name="a.jsonl", unit="line", columns=("prompt",), read=...)`."""

    name: str
    """The file, or what else the user called it."""
    columns: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterable[tuple[int, Cells]]]
    """Gives the numbered rows; only the columns that it is given need to be there."""
    unit: str = "row"
    """What is numbered: `row`, from 0, or `line`, from 1."""

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, Cells]]:
        """Each row after where it stands: `"a.jsonl, line 3"`."""
        for number, cells in self.read(columns):
            yield f"{self.name}, {self.unit} {number}", cells


def plain(value: object, where: str) -> JSON:
    """`value` as JSON has it: numpy's types become Python's, dates ISO text, and NaN (a missing number) null.

    Raises ConfigError, naming `where`, for what JSON cannot hold.
    """
    if isinstance(value, np.longdouble):  # whose tolist() is itself
        return plain(float(value), where)
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), where)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ConfigError(f"{where} holds an infinite number, which JSON cannot hold")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {_key(key, where): plain(one, where) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, where) for one in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return plain(int(value) if is_whole else float(value), where)
    raise ConfigError(f"{where} holds {kind_of(value)}, which JSON cannot hold: only text, numbers, lists and mappings")


def kind_of(value: object) -> str:
    """What a value is, and how it begins: `int 5`."""
    if value is None:
        return "null"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{where} holds a mapping with the key {kind_of(key)}; keys are text")
    return key
