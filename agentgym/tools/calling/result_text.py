"""The text of what a tool returns."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from collections.abc import Mapping, Set
from typing import Any

__all__ = ["format_result"]

TEXTS = (str, datetime.timedelta, decimal.Decimal, uuid.UUID, pathlib.PurePath)


def format_result(value: object) -> str:
    """Returns a result as text: strings as they are, "done" for None, all else as JSON; raises TypeError or ValueError.

    >>> format_result({decimal.Decimal("1.50"): {datetime.date(2024, 5, 1)}})
    '{"1.50": ["2024-05-01"]}'
    """
    plain = _as_json(value)
    if plain is None:
        return "done"
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _as_json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _as_json(value.value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, TEXTS):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_as_json(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, Set):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    for convert in ("tolist", "model_dump"):  # of numpy's scalars and arrays and of tensors, and of pydantic's models
        if callable(method := getattr(value, convert, None)):
            return _as_json(method())
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
