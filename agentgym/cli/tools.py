"""`agentgym tools`: the tools of environments, and the formats in which model families call them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module

from agentgym.cli.groups import Subcommand, run_group

__all__ = ["COMMANDS", "main"]


def main(args: Sequence[str]) -> int:
    """Runs `agentgym tools ...`."""
    return run_group("tools", args, COMMANDS)


def _run(module: str, args: Sequence[str]) -> int:
    """Runs a command, whose module is loaded only now: none of them pays for another one's libraries."""
    code: int = import_module(f"agentgym.cli.{module}").main(args)
    return code


COMMANDS = {
    "list": Subcommand("show tools, with their parameters", partial(_run, "tools_list")),
    "call": Subcommand("run a tool once, and show what a model would be answered", partial(_run, "tools_call")),
    "parse": Subcommand("read replies from standard input as a model family writes them", partial(_run, "tools_parse")),
    "families": Subcommand("show the model families whose replies can be read", partial(_run, "tools_families")),
}
