"""The settings of a run without secrets, its command, and the versions of its environments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.errors import AgentGymError
from agentgym.rollout.record.environments_file import read_environments
from agentgym.rollout.record.settings_file import made_with
from agentgym.types import JSON
from agentgym.url_credentials import SECRETS, URL, has_credentials
from agentgym.viewer.served.episode_view import readable
from agentgym.yaml_text import parse_yaml

__all__ = ["changed_settings", "flat_settings", "run_settings"]

HIDDEN = "(hidden)"
MAX_BYTES = 1 << 20
MAX_SETTINGS = 2_000
FIRST = ("kind", "env", "mix", "algo", "model", "policy", "seed", "steps", "num_tasks", "date")
"""The settings that are shown before the others."""
NAMES_ONLY = re.compile(r"(_env|_variable)\Z")
"""Settings that name the environment variable of a secret."""


def flat_settings(run: Path) -> tuple[dict[str, str], str]:
    """Returns the settings of `config.yaml` by dotted name, secrets hidden, and the reason if there are none."""
    path = run / "config.yaml"
    if not path.is_file():
        return {}, "the run has no config.yaml"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES)
        settings = parse_yaml(text)
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"config.yaml cannot be read: {error}"[:300]
    if not isinstance(settings, Mapping):
        return {}, "config.yaml holds no settings"
    flat: dict[str, str] = {}
    _flatten(settings, "", flat)
    first = [name for name in FIRST if name in flat]
    return {name: flat[name] for name in [*first, *(name for name in flat if name not in first)]}, ""


def run_settings(run: Path) -> dict[str, JSON]:
    """Returns settings, the command that makes such a run again, what it was made with, and its environments."""
    settings, reason = flat_settings(run)
    try:
        environments: dict[str, JSON] = {
            readable(name): {readable(key): readable(_text(value)) for key, value in card.items()}
            for name, card in read_environments(run).items()
        }
    except AgentGymError as error:
        environments, reason = {}, reason or str(error)
    return {
        "settings": list(settings.items()),
        "reason": reason,
        "command": _command(run, settings),
        "made_with": [readable(line) for line in made_with(run)],
        "environments": environments,
    }


def changed_settings(runs: list[Path]) -> list[list[str]]:
    """Returns the name of each setting that is not the same in all runs, with the value of each run, "" without one."""
    settings = [flat_settings(run)[0] for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    values = [[name, *(each.get(name, "") for each in settings)] for name in names]
    return [row for row in values if len(set(row[1:])) > 1]


def _command(run: Path, settings: Mapping[str, str]) -> str:
    """Returns the command that begins a run with these settings; "" for a run that no command reads its settings of."""
    algo = settings.get("algo", "")
    kind = settings.get("kind") or (algo if algo in ("sft", "dpo") else algo and "train")
    return (
        f"agentgym {kind} --config {shlex.quote(str(run / 'config.yaml'))}" if kind in ("train", "sft", "dpo") else ""
    )


def _flatten(value: Any, name: str, flat: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value and len(name) < 200:
        for key, item in value.items():
            _flatten(item, f"{name}.{key}".lstrip("."), flat)
    elif len(flat) < MAX_SETTINGS:
        flat[readable(name)] = HIDDEN if _is_secret(name, value) else readable(_text(value))


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _is_secret(name: str, value: object) -> bool:
    last = name.rpartition(".")[2]
    has_secret_name = isinstance(value, str) and value and SECRETS.search(last) and not NAMES_ONLY.search(last)
    return bool(has_secret_name) or any(map(has_credentials, URL.findall(_text(value))))
