"""Cards: what they refuse, where they are found, and the page that is written from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import environments_page

from agentgym.envs import CARDS, Difficulty, EnvCard, TextEnv, make_env
from agentgym.envs.base.card import card_of, version_of
from agentgym.envs.catalog.listing import describe_env
from agentgym.envs.catalog.plugin import BUNDLED
from agentgym.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": " "}, "says what the task is"),
        ({"reward": ""}, "what the reward is for"),
        ({"reward_range": (1.0, 0.0)}, "least < most"),
        ({"canary_floor": 1.5}, "within reward_range"),
        ({"luck": -1.0}, "luck is at least 0"),
    ],
)
def test_a_card_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvCard(**{"task": "Win.", "reward": "1 for it.", **fields})


def test_a_difficulty_has_values() -> None:
    with pytest.raises(ConfigError, match="a keyword and values"):
        Difficulty(values={})
    assert str(Difficulty(values={1: "easy", 2: "hard"})) == "level=1|2"


@pytest.fixture
def registered() -> Iterator[EnvCard]:
    card = CARDS.add("Registered-v2", EnvCard(task="Win.", reward="1 for it.", version=2))
    yield card
    del CARDS._entries["Registered-v2"]


def test_a_registered_card_comes_before_that_of_the_class(registered: EnvCard) -> None:
    env = make_env("Countdown-v0")
    assert card_of("Registered-v2", env) is registered
    assert card_of("my_games:Registered-v2", env) is registered
    assert card_of("Countdown-v0", env) is env.card
    assert card_of("", TextEnv.__new__(TextEnv)) is None


def test_what_is_no_card_is_refused() -> None:
    class Odd:
        card = "the ace of spades"

    with pytest.raises(ConfigError, match="is a str, not an EnvCard"):
        card_of("Odd-v0", Odd())


def test_an_id_ends_in_its_version() -> None:
    assert (version_of("Game-v12"), version_of("games:Game")) == (12, None)


@pytest.mark.parametrize("env_id", BUNDLED)
def test_every_bundled_environment_has_a_whole_card(env_id: str) -> None:
    card = describe_env(env_id).card
    assert card is not None
    assert all((card.task, card.reward, card.oracle, card.cheat, card.baseline, card.data, card.licence))
    assert card.reward_range[0] <= 0 < 1 <= card.reward_range[1]


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == environments_page(), "run python docs/pages.py"
