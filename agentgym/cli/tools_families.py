"""`agentgym tools families`: the reply formats that can be read, the models that write them, and how each is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.chat_templates.families import FAMILIES
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.cli.display.tables import show_table
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.types import JSON

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class FamiliesOptions:
    """Shows the model families whose replies can be read: name, aliases, models, and how each one is found."""

    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym tools families ...`."""
    options = parse_options(FamiliesOptions, args, prog="agentgym tools families")
    recognized = {FORMATS[family.name].name for family in FAMILIES}
    formats = list(dict.fromkeys(FORMATS.values()))
    rows = [
        [entry.name, ", ".join(entry.aliases), "yes" if entry.name in recognized else "by name", entry.models]
        for entry in formats
    ]
    show_table(["family", "also called", "recognized", "models"], rows)
    say(f"{len(formats)} families; `recognized`: found by a model's chat template; else give --family")
    if options.json:
        families: list[JSON] = [
            {
                "name": entry.name,
                "aliases": list(entry.aliases),
                "models": entry.models,
                "recognized": entry.name in recognized,
            }
            for entry in formats
        ]
        show_json({"families": families})
    return 0
