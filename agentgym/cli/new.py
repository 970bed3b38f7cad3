"""`agentgym new env|tool|reward|sampler|... NAME`: a small working file, its test, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.options import parse_options
from agentgym.cli.scaffold import Scaffold, write_package, write_scaffold
from agentgym.cli.terminal import say, show_json

__all__ = ["main", "run_new"]


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Writes NAME.py and test_NAME.py, to start from, and shows what to try next."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """The name, such as number_lock."""
    output: Path = Path(".")
    """The folder to write into; nothing in it is overwritten."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


@dataclass(frozen=True, kw_only=True)
class NewEnvOptions(NewOptions):
    """Writes NAME.py and test_NAME.py, an environment to start from, and shows what to try next."""

    package: bool = False
    """Write a folder instead, which pip installs: with Gymnasium's entry point, a README, a test and a CI file."""


@dataclass(frozen=True, kw_only=True)
class NewAlgorithmOptions(NewOptions):
    """Writes NAME.py and test_NAME.py, an algorithm to start from, and shows what to try next."""

    kind: Literal["advantage", "loss"] = "advantage"
    """`advantage` rates how good each sampled token was (`--algo`), `loss` is what is minimized (`--learner.loss`)."""


@dataclass(frozen=True, kw_only=True)
class NewRewardOptions(NewOptions):
    """Writes NAME.py and test_NAME.py, a reward function to start from, and shows what to try next."""

    task: Literal["math", "code", "qa"] | None = None
    """The replies that it scores: numbers (`math`), programs (`code`) or short answers (`qa`) of rows of data, with
    two to try. Without it, any episode."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym new ...`."""
    return run_group("new", args, COMMANDS)


def run_new(kind: str, args: Sequence[str], prog: str = "") -> int:
    """Writes what `args` name and shows the commands that try it; `prog` is the command that was typed."""
    prog = prog or f"agentgym new {kind}"
    if kind == "env":
        env = parse_options(NewEnvOptions, args, prog=prog)
        return _show(kind, write_package(env.name, env.output), env) if env.package else _write(kind, env)
    if kind == "algorithm":
        algorithm = parse_options(NewAlgorithmOptions, args, prog=prog)
        return _write(algorithm.kind, algorithm)
    if kind == "reward":
        reward = parse_options(NewRewardOptions, args, prog=prog)
        return _write(kind if reward.task is None else f"reward_{reward.task}", reward)
    return _write(kind, parse_options(NewOptions, args, prog=prog))


def _write(kind: str, options: NewOptions) -> int:
    return _show(kind, write_scaffold(kind, options.name, options.output), options)


def _show(kind: str, new: Scaffold, options: NewOptions) -> int:
    names = [str(path) for path in new.files]
    if new.folder is None:
        say(f"wrote {' and '.join(names)}")
    else:
        say("\n       ".join([f"wrote {new.folder}:", *(str(path.relative_to(new.folder)) for path in new.files)]))
    for number, command in enumerate(new.commands):
        say(f"{'' if number else 'next:':<7}{command}")
    if options.json:
        show_json({kind.partition("_")[0]: new.code_path, "files": [*names], "commands": [*new.commands]})
    return 0


COMMANDS = {
    "env": Subcommand("an environment with a tool; --package to install and share it", partial(run_new, "env")),
    "tool": Subcommand("a tool that any environment can be given", partial(run_new, "tool")),
    "reward": Subcommand("a function from an episode to what it is worth", partial(run_new, "reward")),
    "sampler": Subcommand("a choice of each step's tasks, by results", partial(run_new, "sampler")),
    "optimizer": Subcommand("an optimizer, and a schedule of its rate", partial(run_new, "optimizer")),
    "engine": Subcommand("an engine that samples", partial(run_new, "engine")),
    "renderer": Subcommand("a chat format: messages to ids, ids to a message", partial(run_new, "renderer")),
    "algorithm": Subcommand("an advantage estimator, or a policy loss (--kind loss)", partial(run_new, "algorithm")),
}
