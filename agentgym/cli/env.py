"""`agentgym env list|check|serve|export|new`: lists environments, checks, serves or exports one, or writes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from textwrap import wrap

from agentgym.cli.display.tables import PLAIN_WIDTH, show_table
from agentgym.cli.groups import Subcommand, run_group, run_module
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json, terminal_width
from agentgym.envs.adapters.namespaces import NAMESPACES
from agentgym.envs.catalog.listing import Listed, list_envs
from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.types import JSON

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class EnvListOptions:
    """Lists the bundled environments, and those of other installed packages that depend on agentgym."""

    adapters: bool = False
    """List instead the libraries whose environments have ids such as textarena/Wordle-v0, and how many they have."""
    namespace: str = ""
    """List instead the ids of one of those, by the part before the slash, such as textarena."""
    json: bool = False
    """End with one line of JSON: id, version, package, digest, card, tools, difficulty, keywords, summary of each."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym env ...`."""
    commands = {
        "list": Subcommand("show the environments, their difficulty and their tools", _list),
        "check": Subcommand("play an environment and report what is wrong with it", partial(run_module, "env_check")),
        "serve": Subcommand("serve an environment over OpenEnv's protocol", partial(run_module, "env_serve")),
        "export": Subcommand(
            "write a package of OpenEnv or verifiers, or tasks for Harbor", partial(run_module, "sharing.env_export")
        ),
        "new": Subcommand("write a small environment and its test, to start from", _new),
    }
    return run_group("env", args, commands)


def _new(args: Sequence[str]) -> int:
    from agentgym.cli.new import run_new

    return run_new("env", args, prog="agentgym env new")


def _list(args: Sequence[str]) -> int:
    options = parse_options(EnvListOptions, args, prog="agentgym env list")
    if options.namespace:
        return _list_ids(options.namespace, options.json)
    if options.adapters:
        return _list_namespaces(options.json)
    entries = list_envs()
    _show_envs(entries)
    say("Play one: agentgym play ID --env-kwargs NAME=VALUE.")
    say("Its tools: agentgym tools list ID.  Write your own: agentgym new env NAME.")
    say("Environments of other libraries: agentgym env list --adapters.")
    if options.json:
        show_json({"envs": [entry.to_json() for entry in entries]})
    return 0


def _show_envs(entries: Sequence[Listed]) -> None:
    """Shows at most two lines for each: its id, and its difficulty or its package; then what it is, and its tools."""
    indent = max(len(entry.identity.id) for entry in entries) + 3
    for entry in entries:
        text = " ".join([entry.summary, *([f"Tools: {', '.join(entry.tools)}."] if entry.tools else [])])
        remark = _remark(entry)
        width = terminal_width(PLAIN_WIDTH) - max(indent, len(remark) + 2)
        lines = wrap(text, max(20, width), max_lines=2, placeholder=" ...")
        for cell, line in zip_longest((entry.identity.id, *([remark] if remark else [])), lines, fillvalue=""):
            say(f"{cell:<{indent - 2}}  {line}".rstrip())


def _remark(entry: Listed) -> str:
    if entry.tools is None:
        return f"{entry.identity.package} {entry.identity.package_version}"
    return str((entry.card and entry.card.difficulty) or "")


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
