"""Commands that have commands of their own: `agentgym env list`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from agentgym.cli.help_text import HELP_OPTIONS, Help
from agentgym.errors import ConfigError, UnknownName, nearest

__all__ = ["Subcommand", "run_group", "run_module"]


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One command of a group: its summary in a line, and the function that runs it."""

    summary: str
    run: Callable[[Sequence[str]], int]


def run_group(name: str, args: Sequence[str], commands: Mapping[str, Subcommand]) -> int:
    """Runs the group's command that `args` begins with; `--help` raises Help, which shows them all."""
    if args and args[0] in HELP_OPTIONS:
        raise Help(prog=f"agentgym {name}", commands={key: command.summary for key, command in commands.items()})
    if not args:
        raise ConfigError(f"agentgym {name} takes a command: {', '.join(commands)}")
    if args[0] not in commands:
        begun = next((key for key in commands if args[0].startswith(key)), "")
        near = (
            f": did you mean {begun!r}?" if begun else nearest(args[0], commands)
        ) or f": it has {', '.join(commands)}"
        raise UnknownName(f"unknown command 'agentgym {name} {args[0]}'{near}")
    return commands[args[0]].run(args[1:])


def run_module(module: str, args: Sequence[str]) -> int:
    """Runs a command, whose module is loaded only now: none of them pays for another one's libraries."""
    code: int = import_module(f"agentgym.cli.{module}").main(args)
    return code
