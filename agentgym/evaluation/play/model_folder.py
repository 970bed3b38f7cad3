"""Finds the folder of a model that a user names: `embedded`, or a path."""

from __future__ import annotations

from pathlib import Path

from agentgym.embedded import embedded_folder
from agentgym.errors import RunFolderError

__all__ = ["EMBEDDED", "model_folder"]

EMBEDDED = "embedded"
"""The name of the model that comes with the package."""


def model_folder(name: str) -> Path:
    """Returns the folder; raises RunFolderError if it is missing, or is that of a run or an adapter."""
    folder = embedded_folder() if name == EMBEDDED else Path(name).expanduser()
    if name == EMBEDDED and not (folder / "tokenizer.json").is_file():
        raise RunFolderError(f"this installation lacks the embedded model in {str(folder)!r}: name a model folder")
    if not folder.is_dir():
        raise RunFolderError(f"no model folder {name!r}: give a folder with config.json and tokenizer.json")
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    if checkpoints and not (folder / "config.json").is_file():
        raise RunFolderError(f"{name!r} is a run folder: name one of its checkpoints, such as {str(checkpoints[-1])!r}")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise RunFolderError(
            f"{name!r} is an adapter without its model: `agentgym export RUN DIR` writes the model with it merged in"
        )
    return folder
