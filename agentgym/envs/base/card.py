"""`EnvCard`: the claims of an environment about itself, which `agentgym env check` verifies."""

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
    """The difficulty levels of an environment: `Difficulty(values={1: "three rooms", 2: "six rooms"})`."""

    keyword: str = LEVEL
    """The keyword of the environment's class that sets it."""
    values: Mapping[int, str] | Mapping[str, str]
    """Maps each value of the keyword, from easy to hard, to its meaning. `env check` plays them all."""

    def __post_init__(self) -> None:
        if not self.values or not self.keyword.isidentifier():
            raise ConfigError(f"a difficulty has a keyword and values, got {self.keyword!r} and {self.values!r}")

    def __str__(self) -> str:
        return f"{self.keyword}={'|'.join(map(str, self.values))}"


@dataclass(frozen=True, kw_only=True)
class EnvCard:
    """The task, the reward and the claims of an environment. It is the class's `card`, or is in `CARDS` by id:

        class Lock(ToolEnv):
            card = EnvCard(task="Find the digit that opens a lock.", tools=("turn",), reward="1 when it opens, else 0.")

    A claim that is left out is not checked, and `env check` reports that.
    """

    task: str
    """The task, in a sentence or two."""
    reward: str
    """The rule of the reward, and the cost of a wrong action."""
    tools: tuple[str, ...] = ()
    """The names of the tools; () if the player writes text."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The least and the most that an episode pays in all."""
    luck: float = 0.0
    """The standard deviation of what chance alone adds to an episode's reward."""
    difficulty: Difficulty | None = None
    """The difficulty levels of the tasks; None if all tasks are of one kind."""
    oracle: str = ""
    """The method of the oracle (it scores 1); "" if there is no oracle."""
    cheat: str = ""
    """The tricks of the cheat (it scores 0); "" if there is no cheat."""
    canary_floor: float = 0.0
    """The highest average score of replies without sense."""
    baseline: Mapping[str, float] = field(default_factory=dict)
    """Maps a policy ("random") to its mean score under the default keywords."""
    data: str = SEEDED
    """The source of the tasks."""
    licence: str = ""
    """The licence of the environment and its data."""
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
        fields: dict[str, JSON] = asdict(self)
        if self.difficulty is not None:
            values = {str(value): text for value, text in self.difficulty.values.items()}
            fields["difficulty"] = {"keyword": self.difficulty.keyword, "values": values}
        return fields


CARDS: Registry[EnvCard] = Registry("card")
"""Maps an environment id to its card, for ids that share a class: `CARDS.add("Mine-v0", EnvCard(...))`."""


def card_of(env_id: str, env: object) -> EnvCard | None:
    """The card that was registered for an id, else that of the environment or its class; None if there is none."""
    registered = env_id.rpartition(":")[2]  # `module:Id-v0` imports the module that registers the id
    card = CARDS[registered] if registered in CARDS else getattr(env, "card", None)
    if card is not None and not isinstance(card, EnvCard):
        raise ConfigError(f"the card of {env_id or type(env).__name__} is a {type(card).__name__}, not an EnvCard")
    return card


def version_of(env_id: str) -> int | None:
    """The number after `-v` in an id; None if there is none."""
    match = re.search(r"-v(\d+)$", env_id)
    return int(match.group(1)) if match else None
