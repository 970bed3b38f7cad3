"""The tokenizer, chat format and date that a run was made with, from its `config.yaml`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from agentgym.chat_templates.families import open_renderer
from agentgym.chat_templates.protocol import Renderer
from agentgym.errors import AgentGymError, RunFolderError
from agentgym.loading import is_place
from agentgym.model.model_name import model_folder

__all__ = ["model_folder_of_run", "own_code_options", "own_renderer_of_run", "renderer_of_run", "settings_of_run"]

KEYS = ("tokenizer", "model")
"""The keys of `config.yaml` that name a model folder, or `embedded`; the first one present counts."""


def model_folder_of_run(run: Path, tokenizer: str | None = None) -> Path | None:
    """Returns the folder of the run's tokenizer, or `tokenizer`; None if the run does not name one.

    Raises RunFolderError when the named folder does not exist any more.
    """
    settings = settings_of_run(run)
    name = tokenizer or next((settings[key] for key in KEYS if isinstance(settings.get(key), str)), None)
    template = "" if tokenizer else str(settings.get("chat_template") or "")
    return None if name is None else model_folder(name, template)


def own_renderer_of_run(run: Path) -> str | None:
    """Returns the place of the code that the run renders with; None if it is a renderer of ours."""
    family = settings_of_run(run).get("family")
    return family if isinstance(family, str) and is_place(family) else None


def renderer_of_run(run: Path, tokenizer: str | None = None) -> Renderer | None:
    """Returns the renderer of the run, or of the model folder `tokenizer`; None if the run does not name one.

    A renderer of the user's own is code that this runs. Raises RunFolderError when it, or the named folder, cannot be
    opened any more.
    """
    folder = model_folder_of_run(run, tokenizer)
    if folder is None:
        return None
    settings = settings_of_run(run)
    family, date = (str(settings[key]) if settings.get(key) else None for key in ("family", "date"))
    try:
        return open_renderer(folder, family, date=date, variables=settings.get("chat_template_kwargs"))
    except AgentGymError as error:
        if family is None or not is_place(family):
            raise
        raise RunFolderError(
            f"the run's renderer {family!r} cannot be opened; run the command where the run was started: {error}"
        ) from error


def own_code_options(family: str | None, model_backend: str) -> str:
    """Returns the options that name a renderer and a model class of the user's own to another command."""
    given = {"family": family or "", "model-backend": model_backend}
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in given.items() if is_place(value))


def settings_of_run(run: Path) -> Mapping[str, Any]:
    """Returns the settings in the run's `config.yaml`; empty if there is no such file."""
    config = run / "config.yaml"
    if not config.is_file():
        return {}
    try:
        settings = _parse_settings(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{str(config)!r} cannot be read: {error}; name the model with --tokenizer") from error
    return settings if isinstance(settings, Mapping) else {}


@lru_cache(maxsize=1)
def _parse_settings(text: str) -> object:
    """Returns the value of a YAML text; a command reads the same one several times, which takes 10 ms each."""
    settings: object = yaml.safe_load(text)
    return settings
