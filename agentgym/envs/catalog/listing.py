"""The entries of the list of environments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from agentgym.envs.base.card import EnvCard, card_of, version_of
from agentgym.envs.catalog.resolve import make_env
from agentgym.types import JSON

__all__ = ["Listed", "describe_env"]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An environment in the list."""

    env_id: str
    version: int | None
    """The number after `-v` in the id."""
    card: EnvCard | None
    tools: tuple[str, ...]
    """The names of the tools: the card's, or those of a new environment, which may open more with an episode."""
    keywords: str
    """The keywords of its class, with their defaults."""
    summary: str
    """The first paragraph of its class's docstring."""

    def to_json(self) -> dict[str, JSON]:
        """The entry as JSON."""
        card = None if self.card is None else self.card.to_json()
        return {
            "id": self.env_id,
            "version": self.version,
            "tools": list(self.tools),
            "difficulty": None if card is None else card["difficulty"],
            "card": card,
            "keywords": self.keywords,
            "summary": self.summary,
        }


def describe_env(env_id: str) -> Listed:
    """The list's entry for an environment, which is made for this and closed."""
    env = make_env(env_id)
    doc = inspect.getdoc(type(env)) or ""
    parameters = inspect.signature(type(env)).parameters.values()
    keywords = [
        str(parameter).partition(":")[0] + _default(parameter)
        for parameter in parameters
        if parameter.name != "render_mode"
    ]
    card = card_of(env_id, env)
    env.close()
    return Listed(
        env_id=env_id,
        version=version_of(env_id),
        card=card,
        tools=tuple(spec.name for spec in env.tool_specs) if card is None else card.tools,
        keywords=", ".join(keywords),
        summary=doc.partition("\n\n")[0].replace("\n", " "),
    )


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
