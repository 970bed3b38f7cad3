"""Settings of functions that a run names, and what such a function must take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import pytest

from agentgym.errors import ConfigError, UserCodeFault, nearest
from agentgym.settings.functions import Contract, convert_function_errors, settings_of, with_settings

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


PAIR = Contract("pair", ("first", "second"), keywords=("sequences",))
CHOICE = Contract("choice", (), optional=("rewards_BT", "mask_BT"))


def swapped(second: int, first: int, *, sequences: object = None) -> None: ...
def short(first: int, *, sequences: object = None) -> None: ...
def other(first: int, secnd: int, *, sequences: object = None) -> None: ...
def without_keyword(first: int, second: int) -> None: ...
def without_default(first: int, second: int, *, scale: float, sequences: object = None) -> None: ...
def plain_setting(first: int, second: int, scale: float = 1.0, *, sequences: object = None) -> None: ...
def misnamed(reward_BT: int) -> None: ...
def by_position(rewards_BT: int, /) -> None: ...


@pytest.mark.parametrize(
    ("contract", "function", "problem"),
    [
        (PAIR, swapped, "the inputs are in another order"),
        (PAIR, short, "it lacks second"),
        (PAIR, other, "'secnd' is not an input (did you mean 'second')"),
        (PAIR, without_keyword, "it lacks the keyword sequences"),
        (PAIR, without_default, "the setting 'scale' has no default"),
        (PAIR, plain_setting, "'scale' is not an input (a setting comes after a *)"),
        (PAIR, 3, "is not a function, but of the type int"),
        (CHOICE, misnamed, "'reward_BT' is not an input (did you mean 'rewards_BT')"),
        (CHOICE, by_position, "its inputs are given by name"),
    ],
)
def test_what_does_not_fit_is_refused(contract: Contract, function: Callable[..., object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        contract.check("mine", function)
    assert problem in str(caught.value)
    inputs = "first, second, *, sequences=None, " if contract is PAIR else "any of rewards_BT, mask_BT, *, "
    assert f"{contract.kind} 'mine'" in str(caught.value)
    assert str(caught.value).endswith(f"Wanted: ({inputs}settings with defaults)")


def test_what_fits_is_taken() -> None:
    def pair(first: int, second: int, *, sequences: object = None, scale: float = 1.0) -> int:
        return second

    def choice(mask_BT: int, rewards_BT: object = None, *, scale: float = 1.0) -> int:
        return mask_BT

    for function in (pair, lambda first, second, **others: second):
        PAIR.check("mine", function)
        assert function(1, 2, sequences=None) == 2  # as every function of this contract is called
    for function in (choice, lambda mask_BT: mask_BT):
        CHOICE.check("mine", function)
        assert function(mask_BT=1) == 1


def test_only_what_a_users_function_raises_is_blamed_on_it() -> None:
    with (
        pytest.raises(UserCodeFault, match="the loss failed: ZeroDivisionError"),
        convert_function_errors("the loss", swapped),
    ):
        1 / 0  # noqa: B018 - what the function would do
    with pytest.raises(ZeroDivisionError), convert_function_errors("the loss", nearest):
        1 / 0  # noqa: B018 - what the function would do
