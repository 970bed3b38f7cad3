"""The entries of the list of environments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from gymnasium.envs.registration import registry

from agentgym.envs.base.card import EnvCard, card_of
from agentgym.envs.catalog.identity import EnvIdentity, identify_env
from agentgym.envs.catalog.packages import EnvPackage, load_packages, summary_of
from agentgym.envs.catalog.plugin import BUNDLED
from agentgym.envs.catalog.resolve import make_env
from agentgym.types import JSON

__all__ = ["Listed", "describe_env", "list_envs", "listed_ids"]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An environment in the list."""

    identity: EnvIdentity
    summary: str
    """The first paragraph of its class's docstring."""
    card: EnvCard | None = None
    tools: tuple[str, ...] | None = None
    """The names of the tools: the card's, or those of a new environment, which may open more with an episode. None,
    like the card and the keywords, for an environment of another package, which is listed without importing it."""
    keywords: str | None = None
    """The keywords of its class, with their defaults."""

    def to_json(self) -> dict[str, JSON]:
        """The entry as JSON."""
        card = None if self.card is None else self.card.to_json()
        return {
            **self.identity.to_json(),
            "tools": None if self.tools is None else list(self.tools),
            "difficulty": None if card is None else card["difficulty"],
            "card": card,
            "keywords": self.keywords,
            "summary": self.summary,
        }


def list_envs() -> list[Listed]:
    """Returns the entries of the bundled environments, and of those that other installed packages register."""
    others = [_describe_unmade(env_id, package) for env_id, package in sorted(load_packages().items())]
    return [*map(describe_env, BUNDLED), *others]


def listed_ids() -> list[str]:
    """Returns the ids of the list."""
    return [*BUNDLED, *sorted(load_packages())]


def _describe_unmade(env_id: str, package: EnvPackage) -> Listed:
    return Listed(identity=identify_env(env_id), summary=summary_of(registry[env_id].entry_point, package))


def describe_env(env_id: str) -> Listed:
    """The list's entry for an environment, which is made for this and closed."""
    env = make_env(env_id)
    kind = type(env.unwrapped)
    doc = inspect.getdoc(kind) or ""
    parameters = inspect.signature(kind).parameters.values()
    keywords = [
        str(parameter).partition(":")[0] + _default(parameter)
        for parameter in parameters
        if parameter.name != "render_mode"
    ]
    card = card_of(env_id, env)
    env.close()
    return Listed(
        identity=identify_env(env_id),
        card=card,
        tools=tuple(spec.name for spec in env.tool_specs) if card is None else card.tools,
        keywords=", ".join(keywords),
        summary=doc.partition("\n\n")[0].replace("\n", " "),
    )


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
