"""`EnvCard`: what an environment claims of itself, which `agentgym env check` holds it to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from agentgym.errors import ConfigError
from agentgym.registry import Registry
from agentgym.types import JSON

__all__ = ["CARDS", "SEEDED", "Difficulty", "EnvCard", "card_of", "version_of"]

SEEDED = "drawn from the reset seed; no data"
"""The data source of an environment that makes its tasks up."""
LEVEL = "level"


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard tasks are chosen: `Difficulty(values={1: "three rooms", 2: "six rooms"})`."""

    keyword: str = LEVEL
    """The keyword of the environment's class that sets it."""
    values: Mapping[int, str] | Mapping[str, str]
    """Values of the keyword, from easy to hard, to what each means. `env check` plays them all."""

    def __post_init__(self) -> None:
        if not self.values or not self.keyword.isidentifier():
            raise ConfigError(f"a difficulty has a keyword and values, got {self.keyword!r} and {self.values!r}")

    def __str__(self) -> str:
        return f"{self.keyword}={'|'.join(map(str, self.values))}"


@dataclass(frozen=True, kw_only=True)
class EnvCard:
    """What an environment asks, pays and is measured by. It is the class's `card`, or stands in `CARDS` by id:

        class Lock(ToolEnv):
            card = EnvCard(task="Find the digit that opens a lock.", tools=("turn",), reward="1 when it opens, else 0.")

    A claim that is left out is not checked, and `env check` says so.
    """

    task: str
    """What is to be done, in a sentence or two."""
    reward: str
    """What pays, and what a wrong action costs."""
    tools: tuple[str, ...] = ()
    """Names of the tools; () where the player writes text."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The least and the most that an episode pays in all."""
    luck: float = 0.0
    """Standard deviation of what chance alone adds to an episode's reward."""
    difficulty: Difficulty | None = None
    """How hard the tasks are made; None where they are all of a kind."""
    oracle: str = ""
    """How the oracle plays (it scores 1); "" where there is none."""
    cheat: str = ""
    """What the cheat tries (it scores 0); "" where there is none."""
    canary_floor: float = 0.0
    """What replies without sense may score on average."""
    baseline: Mapping[str, float] = field(default_factory=dict)
    """Policy ("random") to its mean score under the default keywords."""
    data: str = SEEDED
    """Where tasks come from."""
    licence: str = ""
    """Licence of the environment and its data."""
    version: int = 0
    """Counts changes of tasks and rewards; an id that ends in `-v0` has version 0."""

    def __post_init__(self) -> None:
        if not self.task.strip() or not self.reward.strip():
            raise ConfigError("a card says what the task is and what the reward is for; one of them is empty")
        low, high = self.reward_range
        if not low < high:
            raise ConfigError(f"reward_range is (least, most) with least < most, got {self.reward_range}")
        if self.luck < 0 or not low <= self.canary_floor <= high:
            raise ConfigError("luck is at least 0, and canary_floor lies within reward_range")

    def to_json(self) -> dict[str, JSON]:
        """The card as JSON."""
        told: dict[str, JSON] = asdict(self)
        if self.difficulty is not None:
            values = {str(value): text for value, text in self.difficulty.values.items()}
            told["difficulty"] = {"keyword": self.difficulty.keyword, "values": values}
        return told


CARDS: Registry[EnvCard] = Registry("card")
"""Environment id to its card, for those that share a class: `CARDS.add("Mine-v0", EnvCard(...))`."""


def card_of(env_id: str, env: object) -> EnvCard | None:
    """The card that was registered for an id, else that of the environment or its class; None where there is none."""
    registered = env_id.rpartition(":")[2]  # `module:Id-v0` imports the module that registers the id
    card = CARDS[registered] if registered in CARDS else getattr(env, "card", None)
    if card is not None and not isinstance(card, EnvCard):
        raise ConfigError(f"the card of {env_id or type(env).__name__} is a {type(card).__name__}, not an EnvCard")
    return card


def version_of(env_id: str) -> int | None:
    """The number behind `-v` in an id; None where there is none."""
    found = re.search(r"-v(\d+)$", env_id)
    return int(found.group(1)) if found else None
