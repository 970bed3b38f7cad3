"""Settings of functions that a run names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pytest

from agentgym.errors import ConfigError
from agentgym.settings import settings_of, with_settings

if TYPE_CHECKING:
    from decimal import Decimal


def judge(
    value: Decimal,
    *,
    scale: float = 1.0,
    times: int | None = None,
    mode: Literal["a", "b"] = "a",
    tags: Sequence[str] = (),
) -> tuple[object, ...]:
    return (value, scale, times, mode, tags)


def choose(*, mode: Literal["a", "b"] = "a") -> str:
    return mode


def plain(*, scale: float = 1.0, times: int | None = None, tags: Sequence[str] = ()) -> tuple[object, ...]:
    return (scale, times, tags)


def test_settings_are_keyword_only_parameters() -> None:
    assert settings_of(judge, {"tags"}) == {"scale": 1.0, "times": None, "mode": "a"}


def test_types_that_are_plain_are_checked() -> None:
    assert with_settings("plain", plain, {"scale": 2, "times": None, "tags": ["a"]})() == (2, None, ["a"])
    for wrong in ({"scale": "2"}, {"times": 1.5}, {"times": True}):
        with pytest.raises(ConfigError, match="of plain is"):
            with_settings("plain", plain, wrong)


def test_types_that_only_a_checker_sees_are_left_to_the_function() -> None:
    assert with_settings("judge", judge, {"mode": "b", "tags": ["x"]})(1) == (1, 1.0, None, "b", ["x"])
    with pytest.raises(ConfigError, match="setting 'mode' of choose is 'a' or 'b', got 'c'"):
        with_settings("choose", choose, {"mode": "c"})
    with pytest.raises(ConfigError, match="did you mean 'scale'"):
        with_settings("judge", judge, {"scal": 1.0})
