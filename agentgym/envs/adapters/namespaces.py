"""The ids of other ecosystems, and the adapters that play them: `textarena/Wordle-v0`, `text/FrozenLake-v1`."""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from gymnasium.envs.registration import EnvSpec, registry

from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.extras import install_extra

__all__ = ["NAMESPACES", "Namespace", "namespace_of", "needs", "spec_of", "unknown_name"]

HOME = "agentgym.envs.adapters"
URLS = ("http://", "https://", "ws://", "wss://")
NOT_IN_IDS = re.compile(r"[^\w:.-]+")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """The part of an id before the first slash: `NAMESPACES["text"].names()` gives the parts that may follow it."""

    module: str
    """The module that wraps the library; it has a function `names() -> list[str]`."""
    environment: str
    """The class in it."""
    keyword: str
    """The keyword of the class that takes the part after the slash."""
    source: str
    """The origin of the environments."""
    example: str
    """An id, as an example."""

    @property
    def entry_point(self) -> str:
        """The path of the class, as Gymnasium writes it."""
        return f"{HOME}.{self.module}:{self.environment}"

    def names(self) -> list[str]:
        """Every name that the installed library knows; raises ConfigError if it is not installed."""
        list_names: Callable[[], list[str]] = importlib.import_module(f"{HOME}.{self.module}").names
        return list_names()


NAMESPACES = {
    "text": Namespace(
        module="gymnasium_text",
        environment="GymnasiumText",
        keyword="env_id",
        source="Gymnasium environments with few actions, as text",
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
    "verifiers": Namespace(
        module="verifiers",
        environment="Verifiers",
        keyword="name",
        source="verifiers",
        example="verifiers/NAME",
    ),
    "openenv": Namespace(
        module="openenv",
        environment="OpenEnv",
        keyword="url",
        source="OpenEnv servers, by their URL",
        example="openenv/http://127.0.0.1:8000",
    ),
    "harbor": Namespace(
        module="harbor",
        environment="Harbor",
        keyword="path",
        source="Harbor tasks, by their folder",
        example="harbor/path/to/task",
    ),
}
"""Maps the namespace of an id to its adapter."""


def namespace_of(name: str) -> str | None:
    """The namespace of a name that is an adapter's id; None for any other name, and for a class in a `.py` file.

    The bare URL of a server is an id of OpenEnv.
    """
    if name.startswith(URLS):
        return "openenv"
    namespace, slash, rest = name.partition("/")
    return namespace if slash and rest and namespace in NAMESPACES and ".py:" not in rest else None


def spec_of(env_id: str) -> EnvSpec | None:
    """The spec of an adapter's id, which this registers with Gymnasium; None for an id that is no adapter's.

    An id that is registered already keeps its spec.
    """
    namespace = namespace_of(env_id)
    if namespace is None or env_id in registry:
        return registry.get(env_id) if namespace is not None else None
    adapter = NAMESPACES[namespace]
    rest = env_id if env_id.startswith(URLS) else env_id.partition("/")[2]
    plain = NOT_IN_IDS.sub("-", rest)  # Gymnasium's own spelling has one slash
    own = f"{namespace}/{plain}" + ("" if plain == rest else f"-{zlib.crc32(rest.encode()):08x}")
    registry[own] = EnvSpec(id=own, entry_point=adapter.entry_point, kwargs={adapter.keyword: rest})
    return registry[own]


def needs(library: str, extra: str, error: ImportError) -> ConfigError:
    """The error of an adapter whose library cannot be imported."""
    return ConfigError(f"{library} cannot be imported ({error}): {install_extra(extra)}")


def unknown_name(namespace: str, name: str, names: list[str]) -> UnknownName:
    """The error of a name that the library does not know."""
    near = nearest(name, names) or "."
    return UnknownName(
        f"{NAMESPACES[namespace].source} has no {name!r}{near} `agentgym env list --namespace {namespace}` shows all"
    )
