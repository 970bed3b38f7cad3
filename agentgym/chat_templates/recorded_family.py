"""The chat format that a model was trained with, from the settings of its run."""

from __future__ import annotations

from pathlib import Path

from agentgym.errors import ConfigError, RunFolderError
from agentgym.loading import is_place

__all__ = ["recorded_family"]


def recorded_family(folder: Path) -> str | None:
    """Returns the family that a checkpoint's run, or the command that taught a model, recorded; None for other folders.

    It need not be the one that the template suggests, as `--family` may have named another. Raises ConfigError if it
    is code of the user's own, which runs only where it is named, and RunFolderError for settings that cannot be read.
    """
    is_checkpoint = folder.resolve().parent.name == "checkpoints"
    path = folder.resolve().parents[1] / "config.yaml" if is_checkpoint else folder / "config.yaml"
    if not path.is_file():
        return None
    import yaml  # here, because most models have no such file

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error}; name the chat format with --family") from error
    if not isinstance(settings, dict) or not (is_checkpoint or "agentgym" in settings):
        return None
    family = settings.get("family")
    if isinstance(family, str) and is_place(family):
        raise ConfigError(
            f"{str(folder)!r} was trained with a renderer of its own: name it with --family {family}, or another format"
        )
    return family if isinstance(family, str) else None
