"""Which tokenizer a run was made with, as its `config.yaml` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.template_renderer import TemplateRenderer
from agentgym.errors import RunFolderError
from agentgym.evaluation.model_folder import model_folder

__all__ = ["renderer_of_run"]

KEYS = ("tokenizer", "model")
"""Where `config.yaml` names a model folder, or `embedded`; the first that is there."""


def renderer_of_run(run: Path, tokenizer: str | None = None) -> TemplateRenderer | None:
    """The renderer of the run, or of the model folder `tokenizer`; None where the run does not name one.

    Raises RunFolderError when the folder that is named does not exist any more.
    """
    name = tokenizer or _named(run / "config.yaml")
    return None if name is None else renderer_for(model_folder(name))


def _named(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{str(config)!r} cannot be read: {error}; name the model with --tokenizer") from error
    found = settings if isinstance(settings, Mapping) else {}
    return next((found[key] for key in KEYS if isinstance(found.get(key), str)), None)
