"""`agentgym env list|check|serve|new`: lists environments, checks or serves one, or writes a new one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentgym.cli.groups import Subcommand, run_group, run_module

__all__ = ["COMMANDS", "main"]


def main(args: Sequence[str]) -> int:
    """Runs `agentgym env ...`."""
    return run_group("env", args, COMMANDS)


def _new(args: Sequence[str]) -> int:
    from agentgym.cli.new import run_new

    return run_new("env", args, prog="agentgym env new")


COMMANDS = {
    "list": Subcommand("show the environments, their difficulty and their tools", partial(run_module, "env_list")),
    "check": Subcommand("play an environment and report what is wrong with it", partial(run_module, "env_check")),
    "serve": Subcommand("serve an environment over OpenEnv's protocol", partial(run_module, "env_serve")),
    "new": Subcommand("write a small environment and its test, to start from", _new),
}
