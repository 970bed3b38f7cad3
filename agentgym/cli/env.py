"""`agentgym env list|check|serve|new`: lists environments, checks or serves one, or writes a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import gymnasium
import tyro

from agentgym.cli.env_serve import run_serve
from agentgym.cli.environment import unwrap_user_outcome
from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.new import run_new
from agentgym.cli.options import env_as_argument, parse_options
from agentgym.cli.terminal import say, show_json, show_table
from agentgym.envs.adapters.namespaces import NAMESPACES
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.listing import Listed, describe_env
from agentgym.envs.catalog.plugin import BUNDLED
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.rollout.hosting.env_code import attempt
from agentgym.testing.contracts.env import Verdict, examine_env
from agentgym.types import JSON

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class EnvListOptions:
    """Lists the environments that Gymnasium knows and agentgym can play."""

    adapters: bool = False
    """List instead the libraries whose environments have ids such as textarena/Wordle-v0, and how many they have."""
    namespace: str = ""
    """List instead the ids of one of those, by the part before the slash, such as textarena."""
    json: bool = False
    """End with one line of JSON: id, version, card, tools, difficulty, keywords and summary of each."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Plays an environment and shows the verdict of each check; exit code 1 if one failed."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")] = ""
    """Environment id, package.module:Class or path/to/file.py:Class."""
    all: bool = False
    """Check every environment of `agentgym env list`."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""
    json: bool = False
    """End with one line of JSON: the verdict of each check, and what was found."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym env ...`."""
    commands = {
        "list": Subcommand("show the environments, their difficulty and their tools", _list),
        "check": Subcommand("play an environment and report what is wrong with it", _check),
        "serve": Subcommand("serve an environment over OpenEnv's protocol", run_serve),
        "new": Subcommand(
            "write a small environment and its test, to start from", partial(run_new, "env", prog="agentgym env new")
        ),
    }
    return run_group("env", args, commands)


def _list(args: Sequence[str]) -> int:
    options = parse_options(EnvListOptions, args, prog="agentgym env list")
    if options.namespace:
        return _list_ids(options.namespace, options.json)
    if options.adapters:
        return _list_namespaces(options.json)
    found = [describe_env(env_id) for env_id in playable_ids()]
    show_table(["environment", "difficulty", "tools", "what it is"], [_row(entry) for entry in found])
    say("Play one: agentgym play ID --env-kwargs NAME=VALUE.  Write your own: agentgym new env NAME.")
    say("Environments of other libraries: agentgym env list --adapters.")
    if options.json:
        show_json({"envs": [entry.to_json() for entry in found]})
    return 0


def _row(entry: Listed) -> list[str]:
    difficulty = entry.card.difficulty if entry.card is not None else None
    return [entry.env_id, str(difficulty or ""), ", ".join(entry.tools), entry.summary]


def playable_ids() -> list[str]:
    """Returns the bundled ids, then the text environments that others registered with Gymnasium."""
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


def _list_ids(namespace: str, as_json: bool) -> int:
    """Shows the ids of one of the libraries whose environments are played by adapters."""
    if namespace not in NAMESPACES:
        near = nearest(namespace, NAMESPACES) or "."
        raise UnknownName(f"no namespace {namespace!r}{near} Known: {', '.join(NAMESPACES)}")
    ids = _ids(namespace)
    for env_id in ids:
        say(env_id)
    if as_json:
        show_json({"namespace": namespace, "ids": list[JSON](ids)})
    return 0


def _list_namespaces(as_json: bool) -> int:
    """Shows those libraries, by what is installed."""
    rows: list[list[str]] = []
    namespaces: list[JSON] = []
    for name, namespace in NAMESPACES.items():
        try:
            ids, lacks = _ids(name), ""
        except ConfigError as error:  # its library is not installed
            ids, lacks = [], str(error)
        rows.append([f"{name}/", namespace.source, lacks or (str(len(ids)) if ids else "any"), namespace.example])
        namespaces.append(
            {"namespace": name, "source": namespace.source, "ids": list[JSON](ids), "lacks": lacks or None}
        )
    show_table(["namespace", "whose environments", "ids", "for example"], rows)
    say("The ids of one: agentgym env list --namespace NAME.  Play one: agentgym play NAMESPACE/NAME.")
    if as_json:
        show_json({"namespaces": namespaces})
    return 0


def _ids(namespace: str) -> list[str]:
    return [f"{namespace}/{name}" for name in NAMESPACES[namespace].names()]


def _check(args: Sequence[str]) -> int:
    options = parse_options(CheckOptions, env_as_argument(args), prog="agentgym env check")
    if options.all == bool(options.env):
        raise ConfigError("agentgym env check takes one environment, or --all; `agentgym env list` shows them")
    if options.all:
        return _check_all(options)
    unwrap_user_outcome(attempt(lambda: resolve_env(options.env)), f"{options.env} cannot be loaded")
    verdicts = examine_env(options.env, options.env_kwargs)
    show_table(["check", "verdict", "what was seen"], [_verdict_row(verdict) for verdict in verdicts])
    printed = next((verdict for verdict in verdicts if verdict.printed), None)
    if printed is not None:
        say(f"During the check {printed.check!r} it printed:\n{printed.printed}")
    num_failed, counts = _count(verdicts)
    say(f"{options.env}: {counts}" + ("" if num_failed else f". Play it: agentgym play {options.env}"))
    if options.json:
        show_json(_verdicts_json(options.env, verdicts))
    return 1 if num_failed else 0


def _check_all(options: CheckOptions) -> int:
    reports: list[JSON] = []
    num_failed = 0
    for env_id in playable_ids():
        verdicts = examine_env(env_id, options.env_kwargs)
        wrong = [_verdict_row(verdict) for verdict in verdicts if verdict.findings]
        if wrong:
            show_table(["check", "verdict", "what was seen"], wrong, title=env_id)
        failed, counts = _count(verdicts)
        say(f"{env_id}: {counts}")
        num_failed += bool(failed)
        reports.append(_verdicts_json(env_id, verdicts))
    say(f"{len(reports) - num_failed} of {len(reports)} environments passed")
    if options.json:
        show_json({"ok": not num_failed, "envs": reports})
    return 1 if num_failed else 0


def _verdict_row(verdict: Verdict) -> list[str]:
    seen = [finding.message for finding in verdict.findings]
    return [verdict.check, verdict.verdict, "; ".join([*seen, verdict.not_claimed] if verdict.not_claimed else seen)]


def _count(verdicts: Sequence[Verdict]) -> tuple[int, str]:
    """Returns the number of failed checks, and one line on all of them."""
    kinds = ("passed", "warned", "failed", "not claimed")
    counts = {kind: sum(verdict.verdict == kind for verdict in verdicts) for kind in kinds}
    parts = [f"{number} {kind}" for kind, number in counts.items() if number]
    return counts["failed"], f"{'FAILED' if counts['failed'] else 'ok'}, {', '.join(parts)} of {len(verdicts)} checks"


def _verdicts_json(env: str, verdicts: Sequence[Verdict]) -> dict[str, JSON]:
    findings: list[JSON] = [
        {"check": finding.check, "severity": finding.severity, "message": finding.message}
        for verdict in verdicts
        for finding in verdict.findings
    ]
    checks: list[JSON] = [
        {
            "check": verdict.check,
            "verdict": verdict.verdict,
            "seen": _verdict_row(verdict)[2],
            "printed": verdict.printed,
        }
        for verdict in verdicts
    ]
    num_failed = _count(verdicts)[0]
    return {"ok": not num_failed, "env": env, "num_checks": len(verdicts), "checks": checks, "findings": findings}
