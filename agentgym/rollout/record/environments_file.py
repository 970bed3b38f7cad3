"""`environments.json`: the environments of a run, each with version, package and digest."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentgym.errors import RunFolderError
from agentgym.rollout.record.manifest import replace_file
from agentgym.types import JSON

__all__ = ["ENVIRONMENTS", "changed_environments", "read_environments", "record_environments"]

_log = logging.getLogger(__name__)
ENVIRONMENTS = "environments.json"
Environments = Mapping[str, Mapping[str, JSON]]
"""The fields of `EnvIdentity` by the environment's name."""


def record_environments(folder: Path, names: Iterable[str]) -> None:
    """Writes the file of a new run. In a run that goes on, warns of environments that have changed since it began."""
    from agentgym.envs.catalog.identity import identify_env  # here, and not above: reading needs no environment

    cards: Environments = {name: identify_env(name).to_json() for name in sorted(set(names))}
    stored = read_environments(folder)
    if not stored:
        replace_file(folder / ENVIRONMENTS, json.dumps(cards, indent=1, default=dict) + "\n")
    for name in changed_environments(stored, cards):
        _log.warning("%s has changed since the run in %s began: its code or its data has another digest", name, folder)


def read_environments(folder: Path) -> Environments:
    """Returns the environments of a run; none for a run that recorded none."""
    path = folder / ENVIRONMENTS
    try:
        cards: Environments = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(cards, dict) or not all(isinstance(card, dict) for card in cards.values()):
        raise RunFolderError(f"{str(path)!r} holds no environments by their names")
    return cards


def changed_environments(first: Environments, second: Environments) -> list[str]:
    """Returns the names of both whose digests differ."""
    return [name for name in first if name in second and first[name].get("digest") != second[name].get("digest")]
