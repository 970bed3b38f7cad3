"""The context window that a model folder declares."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from agentgym.errors import ConfigError, RunFolderError
from agentgym.types import JSON

__all__ = ["declared_window", "folder_window"]

DEFAULT_WINDOW = 2048
"""The window of a model whose configuration does not declare one; the default of Llama in `transformers`."""


def declared_window(config: Mapping[str, JSON]) -> int:
    """Returns `max_position_embeddings` of a `config.json`; raises ConfigError unless it is a positive integer."""
    value = config.get("max_position_embeddings")
    if value is None:
        return DEFAULT_WINDOW
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json needs a positive integer 'max_position_embeddings', got {value!r}")
    return value


def folder_window(folder: str | os.PathLike[str]) -> int:
    """Returns the window of the model in a folder; raises RunFolderError if it has no readable config.json."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"no model in {str(folder)!r}: its config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise RunFolderError(f"no model in {str(folder)!r}: its config.json holds no settings")
    return declared_window(config)
