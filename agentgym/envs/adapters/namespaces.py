"""Which ids belong to other ecosystems, and what plays them: `textarena/Wordle-v0`, `text/FrozenLake-v1`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from gymnasium.envs.registration import EnvSpec, registry, spec

from agentgym.errors import ConfigError, UnknownName, nearest

__all__ = ["NAMESPACES", "Namespace", "namespace_of", "needs", "spec_of", "unknown"]

HOME = "agentgym.envs.adapters"


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What stands before the first slash of an id: `NAMESPACES["text"].names()` gives what may stand behind it."""

    module: str
    """The module that wraps the library; it has a function `names() -> list[str]`."""
    environment: str
    """The class in it."""
    keyword: str
    """The keyword of the class that takes what stands behind the slash."""
    source: str
    """Whose environments these are."""
    example: str
    """One of the ids."""

    @property
    def entry_point(self) -> str:
        """Where the class is, as Gymnasium writes it."""
        return f"{HOME}.{self.module}:{self.environment}"

    def names(self) -> list[str]:
        """Every name that the installed library knows; raises ConfigError where it is not installed."""
        known: Callable[[], list[str]] = importlib.import_module(f"{HOME}.{self.module}").names
        return known()


NAMESPACES = {
    "text": Namespace(
        module="gymnasium_text",
        environment="GymnasiumText",
        keyword="env_id",
        source="Gymnasium environments with few actions, told as text",
        example="text/FrozenLake-v1",
    ),
    "reasoning_gym": Namespace(
        module="reasoning_gym",
        environment="ReasoningGym",
        keyword="dataset",
        source="reasoning-gym",
        example="reasoning_gym/leg_counting",
    ),
    "textarena": Namespace(
        module="textarena",
        environment="TextArena",
        keyword="game",
        source="TextArena",
        example="textarena/GuessTheNumber-v0",
    ),
    "gem": Namespace(
        module="gem",
        environment="Gem",
        keyword="gem_id",
        source="GEM",
        example="gem/game:GuessTheNumber-v0-easy",
    ),
}
"""Namespace of an id to what plays it."""


def namespace_of(name: str) -> str | None:
    """The namespace of a name that is an adapter's id; None for any other name, and for a place in a `.py` file."""
    namespace, slash, rest = name.partition("/")
    return namespace if slash and rest and namespace in NAMESPACES and ".py:" not in rest else None


def spec_of(env_id: str) -> EnvSpec | None:
    """What Gymnasium makes an adapter's id from, registered from now on; None for an id that is no adapter's.

    An id that somebody registered is theirs.
    """
    namespace = namespace_of(env_id)
    if namespace is None:
        return None
    if env_id not in registry:
        adapter = NAMESPACES[namespace]
        rest = env_id.partition("/")[2]
        registry[env_id] = EnvSpec(id=env_id, entry_point=adapter.entry_point, kwargs={adapter.keyword: rest})
    return spec(env_id)


def needs(library: str, extra: str, error: ImportError) -> ConfigError:
    """The error of an adapter whose library cannot be imported."""
    return ConfigError(f"{library} cannot be imported ({error}): pip install 'agentgym-llm[{extra}]'")


def unknown(namespace: str, name: str, known: list[str]) -> UnknownName:
    """The error of a name that the library does not know."""
    near = nearest(name, known) or "."
    return UnknownName(
        f"{NAMESPACES[namespace].source} has no {name!r}{near} `agentgym env list --namespace {namespace}` shows all"
    )
