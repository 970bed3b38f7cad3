"""`agentgym env check`: plays an environment and reports what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from agentgym.cli.display.tables import show_table
from agentgym.cli.options import env_as_argument, parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.envs.catalog.listing import listed_ids
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import ConfigError
from agentgym.rollout.hosting.env_code import attempt, unwrap_user_outcome
from agentgym.testing.contracts.env import Verdict, examine_env
from agentgym.types import JSON

__all__ = ["main"]


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
    """Runs `agentgym env check`."""
    options = parse_options(CheckOptions, env_as_argument(args), prog="agentgym env check")
    if options.all == bool(options.env):
        raise ConfigError("agentgym env check takes one environment, or --all; `agentgym env list` shows them")
    if options.all:
        return _check_all(options)
    unwrap_user_outcome(attempt(lambda: resolve_env(options.env)), f"{options.env} cannot be loaded")
    verdicts = examine_env(options.env, options.env_kwargs)
    show_table(["check", "verdict", "what was seen"], _verdict_rows(verdicts))
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
    for env_id in listed_ids():
        verdicts = examine_env(env_id, options.env_kwargs)
        wrong = _verdict_rows([verdict for verdict in verdicts if verdict.findings])
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


def _verdict_rows(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Returns the rows of the table; of a fault that several checks meet, the first has the text."""
    first: dict[str, str] = {}
    rows = []
    for verdict in verdicts:
        seen = _complaint_text(verdict)
        check = first.setdefault(seen, verdict.check) if verdict.findings else verdict.check
        rows.append([verdict.check, verdict.verdict, seen if check == verdict.check else f"the fault of {check!r}"])
    return rows


def _complaint_text(verdict: Verdict) -> str:
    return "; ".join(filter(None, [*(finding.message for finding in verdict.findings), verdict.not_claimed]))


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
            "seen": _complaint_text(verdict),
            "printed": verdict.printed,
        }
        for verdict in verdicts
    ]
    num_failed = _count(verdicts)[0]
    return {"ok": not num_failed, "env": env, "num_checks": len(verdicts), "checks": checks, "findings": findings}
