"""The common form of every source of rows: named columns, and numbered rows of plain JSON values."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

import numpy as np

from agentgym.errors import ConfigError
from agentgym.types import JSON, Task

__all__ = ["Cells", "Table", "describe_value", "to_json_value"]

Cells: TypeAlias = "Mapping[str, object] | Task"
"""A row: the values of its columns, or the task itself if a generator made one."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A source of rows that is not read yet: `Table(name="a.jsonl", unit="line", columns=("prompt",), read=...)`."""

    name: str
    """The file, or another name that the user gave."""
    columns: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterable[tuple[int, Cells]]]
    """A function that yields the numbered rows, with at least the columns that it is called with."""
    unit: str = "row"
    """The unit that is numbered: `row`, from 0, or `line`, from 1."""
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The keys of a mapping by its path, `{"reward_model": ("style", "ground_truth")}`, in a format that gives them to
    every row. A key that a row lacks is null there. Empty for formats whose rows have keys of their own, as JSON."""

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, Cells]]:
        """Yields each row with its location: `"a.jsonl, line 3"`."""
        for number, cells in self.read(columns):
            yield f"{self.name}, {self.unit} {number}", cells


def to_json_value(value: object, where: str) -> JSON:
    """Converts `value` to JSON: numpy's types become Python's, dates ISO text, and NaN (a missing number) null.

    Raises ConfigError, naming `where`, for a value that JSON cannot represent.
    """
    if isinstance(value, np.longdouble):  # its tolist() returns itself
        return to_json_value(float(value), where)
    if isinstance(value, np.generic | np.ndarray):
        return to_json_value(value.tolist(), where)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ConfigError(f"{where} holds an infinite number, which JSON cannot hold")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {_key(key, where): to_json_value(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item, where) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return to_json_value(int(value) if is_whole else float(value), where)
    raise ConfigError(
        f"{where} holds {describe_value(value)}, which JSON cannot hold: only text, numbers, lists and mappings"
    )


def describe_value(value: object) -> str:
    """Returns the type and the beginning of a value: `int 5`."""
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{where} holds a mapping with the key {describe_value(key)}; keys are text")
    return key
