"""The entries of the list of environments, and the page of the bundled ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from agentgym.envs.base.card import EnvCard, card_of, version_of
from agentgym.envs.catalog.resolve import make_env
from agentgym.types import JSON

__all__ = ["Listed", "describe_env", "environments_markdown"]

PAGE_HEAD = """# Environments

Written by `agentgym env list --markdown` from the environments' cards. `agentgym env check ID` holds each to its card:
the oracle scores 1, the cheat 0, players without sense stay below the floor, and the baseline is what it says.
"""


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


def environments_markdown(env_ids: Iterable[str]) -> str:
    """The page of the environments with a card."""
    found = [describe_env(env_id) for env_id in env_ids]
    return "\n".join([PAGE_HEAD, *_table(found), *(line for entry in found for line in _section(entry))]) + "\n"


def _table(found: Iterable[Listed]) -> list[str]:
    lines = ["| environment | difficulty | tools | random |", "|---|---|---|---|"]
    for entry in found:
        if entry.card is not None:
            difficulty = f"`{entry.card.difficulty}`".replace("|", ", ") if entry.card.difficulty else ""
            random = entry.card.baseline.get("random")
            cells = (entry.env_id, difficulty, ", ".join(entry.tools), "" if random is None else f"{random:g}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _section(entry: Listed) -> list[str]:
    card = entry.card
    if card is None:
        return []
    low, high = card.reward_range
    lines = ["", f"## {entry.env_id}", "", card.task, ""]
    if entry.keywords:
        lines.append(f"- *Keywords:* `{entry.keywords}`")
    if card.difficulty is not None:
        levels = "; ".join(f"{value}: {text}" for value, text in card.difficulty.values.items())
        lines.append(f"- *Difficulty* (`{card.difficulty.keyword}`): {levels}")
    lines.append(f"- *Reward* ({low:g} to {high:g}): {card.reward}")
    if card.oracle:
        lines.append(f"- *Oracle* (scores 1): {card.oracle}")
    if card.cheat:
        lines.append(f"- *Cheat* (scores 0): {card.cheat}")
    lines.append(f"- *Players without sense* score at most {card.canary_floor:g}")
    if card.baseline:
        scores = ", ".join(f"{policy} {score:g}" for policy, score in card.baseline.items())
        lines.append(f"- *Baseline:* {scores} (mean score, default keywords)")
    lines.append(f"- *Data:* {card.data}. *Licence:* {card.licence or 'not told'}")
    return lines
