"""`agentgym tools`: the tools of environments, and the formats in which model families call them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentgym.cli.groups import Subcommand, run_group, run_module

__all__ = ["COMMANDS", "main"]


def main(args: Sequence[str]) -> int:
    """Runs `agentgym tools ...`."""
    return run_group("tools", args, COMMANDS)


COMMANDS = {
    "list": Subcommand("show tools, with their parameters", partial(run_module, "tools_list")),
    "call": Subcommand("run a tool once, and show what a model would be answered", partial(run_module, "tools_call")),
    "parse": Subcommand(
        "read replies from standard input as a model family writes them", partial(run_module, "tools_parse")
    ),
    "mcp": Subcommand(
        "offer a served episode's tools to an agent that starts MCP servers", partial(run_module, "sharing.tools_mcp")
    ),
    "families": Subcommand("show the model families whose replies can be read", partial(run_module, "tools_families")),
}
