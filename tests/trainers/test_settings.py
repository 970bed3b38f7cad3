"""A function that takes something else than its table's is refused with what was wanted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentgym.errors import ConfigError, UserCodeFault
from agentgym.trainers import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_PENALTIES, LOSSES
from agentgym.trainers.losses import ppo_clip
from agentgym.trainers.settings import Contract, calling

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
    ("contract", "function", "told"),
    [
        (PAIR, swapped, "the inputs stand in another order"),
        (PAIR, short, "it lacks second"),
        (PAIR, other, "'secnd' is no input (did you mean 'second')"),
        (PAIR, without_keyword, "it lacks the keyword sequences"),
        (PAIR, without_default, "the setting 'scale' has no default"),
        (PAIR, plain_setting, "'scale' is no input (a setting stands behind a *)"),
        (PAIR, 3, "is no function, but of the type int"),
        (CHOICE, misnamed, "'reward_BT' is no input (did you mean 'rewards_BT')"),
        (CHOICE, by_position, "its inputs are given by name"),
    ],
)
def test_what_does_not_fit_is_refused(contract: Contract, function: Callable[..., object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        contract.check("mine", function)
    assert told in str(caught.value)
    wanted = "first, second, *, sequences=None, " if contract is PAIR else "any of rewards_BT, mask_BT, *, "
    assert f"{contract.kind} 'mine'" in str(caught.value)
    assert str(caught.value).endswith(f"Wanted: ({wanted}settings with defaults)")


def test_what_fits_is_taken() -> None:
    PAIR.check("a", lambda first, second, *, sequences=None, scale=1.0: None)
    PAIR.check("b", lambda first, second, **others: None)
    CHOICE.check("c", lambda mask_BT: None)
    CHOICE.check("d", lambda mask_BT, rewards_BT=None, *, scale=1.0: None)


@pytest.mark.parametrize("table", [ADVANTAGES, LOSSES, KL_PENALTIES, AGGREGATIONS, CORRECTIONS])
def test_every_table_of_algorithms_refuses_a_function_of_something_else(table: object) -> None:
    with pytest.raises(ConfigError, match="'logits' is no input"):
        table.add("mine", lambda logits: logits)  # type: ignore[attr-defined]
    assert "mine" not in table  # type: ignore[operator]


def test_only_what_a_users_function_raises_is_blamed_on_it() -> None:
    with pytest.raises(UserCodeFault, match="the loss failed: ZeroDivisionError"), calling("the loss", swapped):
        1 / 0  # noqa: B018 - what the function would do
    with pytest.raises(ZeroDivisionError), calling("the loss", ppo_clip):
        1 / 0  # noqa: B018 - what the function would do
