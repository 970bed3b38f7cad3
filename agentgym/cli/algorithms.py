"""`agentgym algorithms`: the estimators, losses, aggregations and corrections of `train`, with settings and sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.cli.display.tables import show_table
from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.types import JSON

__all__ = ["COMMANDS", "main"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmsListOptions:
    """Shows every preset, advantage estimator, loss, KL penalty, aggregation and off-policy correction by name."""

    json: bool = False
    """End with one line of JSON: kind, name, summary, details, inputs, settings with their defaults."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym algorithms ...`."""
    return run_group("algorithms", args, COMMANDS)


def _list(args: Sequence[str]) -> int:
    options = parse_options(AlgorithmsListOptions, args, prog="agentgym algorithms list")
    from agentgym.trainers.algorithms.catalog import TABLES, all_algorithms  # here: help and mistakes need no torch

    algorithms = all_algorithms()
    rows = [
        [
            algorithm.kind,
            algorithm.name,
            ", ".join(f"{name}={default}" for name, default in algorithm.settings.items()),
            algorithm.summary,
        ]
        for algorithm in algorithms
    ]
    show_table(["kind", "name", "settings", "what it is"], rows)
    say("preset: --algo NAME")
    for table in TABLES:
        say(f"{table.kind}: {table.option}")
    if options.json:
        algorithms_json: list[JSON] = [
            {
                "kind": algorithm.kind,
                "name": algorithm.name,
                "summary": algorithm.summary,
                "details": algorithm.details,
                "inputs": list(algorithm.inputs),
                "settings": {name: _plain(default) for name, default in algorithm.settings.items()},
            }
            for algorithm in algorithms
        ]
        show_json({"algorithms": algorithms_json})
    return 0


def _plain(value: object) -> JSON:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


COMMANDS = {"list": Subcommand("show all algorithms, with settings, defaults and sources", _list)}
