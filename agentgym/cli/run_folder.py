"""The tokenizer, chat format and date that a run was made with, from its `config.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import RunFolderError
from agentgym.model.model_name import model_folder

__all__ = ["renderer_of_run", "settings_of_run"]

KEYS = ("tokenizer", "model")
"""The keys of `config.yaml` that name a model folder, or `embedded`; the first one present counts."""


def renderer_of_run(run: Path, tokenizer: str | None = None) -> TemplateRenderer | None:
    """Returns the renderer of the run, or of the model folder `tokenizer`; None if the run does not name one.

    Raises RunFolderError when the named folder does not exist any more.
    """
    settings = settings_of_run(run)
    name = tokenizer or next((settings[key] for key in KEYS if isinstance(settings.get(key), str)), None)
    if name is None:
        return None
    family, date = (str(settings[key]) if settings.get(key) else None for key in ("family", "date"))
    return renderer_for(model_folder(name), family, date=date)


def settings_of_run(run: Path) -> Mapping[str, Any]:
    """Returns the settings in the run's `config.yaml`; empty if there is no such file."""
    config = run / "config.yaml"
    if not config.is_file():
        return {}
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{str(config)!r} cannot be read: {error}; name the model with --tokenizer") from error
    return settings if isinstance(settings, Mapping) else {}
