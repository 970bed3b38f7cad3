"""The text of values that are no JSON, wherever they are in a result."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from agentgym.tools.calling.result_text import format_result

UUID = uuid.UUID(int=7)


class Color(enum.Enum):
    RED = "red"


class Mood(str, enum.Enum):  # noqa: UP042  # `str()` of a member is another text
    GOOD = "good"


class Level(enum.IntEnum):
    HIGH = 3


class Town(BaseModel):
    name: str
    founded: datetime.date


@dataclasses.dataclass
class Holder:
    value: Any


VALUES: list[tuple[object, Any]] = [
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array([[1, 2]]), [[1, 2]]),
    (np.array([0.5], dtype=np.float32), [0.5]),
    (np.datetime64("2024-05-01"), "2024-05-01"),
    (Color.RED, "red"),
    (Mood.GOOD, "good"),
    (Level.HIGH, 3),
    (datetime.date(2024, 5, 1), "2024-05-01"),
    (datetime.datetime(2024, 5, 1, 12, 30), "2024-05-01T12:30:00"),
    (datetime.time(12, 30), "12:30:00"),
    (datetime.timedelta(hours=1), "1:00:00"),
    (decimal.Decimal("1.50"), "1.50"),
    (UUID, str(UUID)),
    (pathlib.Path("a/b"), "a/b"),
    (Town(name="Oslo", founded=datetime.date(1048, 1, 1)), {"name": "Oslo", "founded": "1048-01-01"}),
    ({2, 1}, [1, 2]),
    ((1, "a"), [1, "a"]),
]


@pytest.mark.parametrize(("value", "plain"), VALUES, ids=repr)
def test_a_value_is_text_or_json_wherever_it_is(value: Any, plain: Any) -> None:
    assert format_result(value) == (plain if isinstance(plain, str) else json.dumps(plain))
    assert json.loads(format_result([value, {"a": (value,)}])) == [plain, {"a": [plain]}]
    assert json.loads(format_result(Holder([Holder(value)]))) == {"value": [{"value": plain}]}


@pytest.mark.parametrize(
    ("value", "plain"), [entry for entry in VALUES if isinstance(entry[1], str | int | float)], ids=repr
)
def test_a_key_is_text_as_a_value_is(value: Any, plain: Any) -> None:
    assert format_result({value: 1}) == json.dumps({plain: 1})
