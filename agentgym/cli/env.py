"""`agentgym env list|check|new`: which environments there are, whether one is sound, and a new one to begin with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import gymnasium
import tyro

from agentgym.cli.environment import opened
from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.new import run_new
from agentgym.cli.options import env_as_argument, parse_options
from agentgym.cli.terminal import say, show_json, show_table
from agentgym.envs.plugin import BUNDLED
from agentgym.envs.resolve import make_env, resolve_env
from agentgym.envs.text_env import TextEnv
from agentgym.rollout.threads import attempt
from agentgym.testing.env import CHECKS, check_env
from agentgym.types import JSON

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Lists the environments that Gymnasium knows and agentgym can play."""

    json: bool = False
    """End with one line of JSON."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Plays an environment and reports what is wrong with it; exit code 1 if something is."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Environment id, package.module:Class or path/to/file.py:Class."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""
    json: bool = False
    """End with one line of JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym env ...`."""
    commands = {
        "list": Subcommand("show the environments, their keywords and their tools", _list),
        "check": Subcommand("play an environment and report what is wrong with it", _check),
        "new": Subcommand(
            "write a small environment and its test, to start from", partial(run_new, "env", prog="agentgym env new")
        ),
    }
    return run_group("env", args, commands)


def _list(args: Sequence[str]) -> int:
    options = parse_options(ListOptions, args, prog="agentgym env list")
    described = [_described(env_id) for env_id in playable_ids()]
    rows = [[str(one["id"]), str(one["keywords"]), str(one["summary"])] for one in described]
    show_table(["environment", "keywords", "what it is"], rows)
    say("Play one: agentgym play ID --env-kwargs NAME=VALUE.  Write your own: agentgym new env NAME.")
    if options.json:
        show_json({"envs": described})
    return 0


def playable_ids() -> list[str]:
    """The bundled ids, then the text environments that others registered with Gymnasium."""
    others = (env_id for env_id in gymnasium.envs.registration.registry if env_id not in BUNDLED)
    return [*BUNDLED, *sorted(env_id for env_id in others if _is_text_env(env_id))]


def _is_text_env(env_id: str) -> bool:
    entry: object = gymnasium.envs.registration.registry[env_id].entry_point
    if isinstance(entry, str):
        if entry.startswith("gymnasium."):
            return False
        try:
            entry = gymnasium.envs.registration.load_env_creator(entry)
        except ImportError:  # a plug-in whose own libraries are missing
            return False
    return isinstance(entry, type) and issubclass(entry, TextEnv)


def _described(env_id: str) -> dict[str, JSON]:
    env = make_env(env_id)
    doc = inspect.getdoc(type(env)) or ""
    parameters = inspect.signature(type(env)).parameters.values()
    keywords = [str(one).partition(":")[0] + _default(one) for one in parameters if one.name != "render_mode"]
    env.close()
    return {"id": env_id, "keywords": ", ".join(keywords), "summary": doc.partition("\n\n")[0].replace("\n", " ")}


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"


def _check(args: Sequence[str]) -> int:
    options = parse_options(CheckOptions, env_as_argument(args), prog="agentgym env check")
    opened(attempt(lambda: resolve_env(options.env)), f"{options.env} cannot be loaded")
    findings = check_env(options.env, options.env_kwargs)
    if findings:
        show_table(
            ["check", "severity", "what was found"], [[one.check, one.severity, one.message] for one in findings]
        )
    num_errors = sum(one.severity == "error" for one in findings)
    if num_errors:
        say(f"{options.env}: {num_errors} of {len(CHECKS)} checks failed")
    else:
        say(f"{options.env}: ok, {len(CHECKS)} checks. Play it: agentgym play {options.env}")
    if options.json:
        found: list[JSON] = [{"check": one.check, "severity": one.severity, "message": one.message} for one in findings]
        show_json({"ok": not num_errors, "env": options.env, "num_checks": len(CHECKS), "findings": found})
    return 1 if num_errors else 0
