"""The chat format that a model was trained with, from the settings of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.errors import ConfigError, RunFolderError
from agentgym.loading import is_code_path
from agentgym.types import JSON

__all__ = ["RecordedFormat", "recorded_format"]

OWN: Mapping[str, str] = {
    "messages": "they are those of the episode",
    "tools": "they are those of the environment",
    "documents": "there are none",
    "add_generation_prompt": "it is on before each reply",
    "strftime_now": "date sets the present moment",
}
"""The variables of a template that a renderer sets, and where they come from."""


@dataclass(frozen=True, kw_only=True)
class RecordedFormat:
    """The chat format that settings record; the defaults leave it to the template."""

    family: str | None = None
    chat_template_kwargs: Mapping[str, JSON] = field(default_factory=dict)

    def family_for(self, folder: str | Path) -> str | None:
        """Returns the family; raises ConfigError for the user's own code, which runs only where it is named."""
        if self.family is not None and is_code_path(self.family):
            raise ConfigError(
                f"{str(folder)!r} was trained with a renderer of its own: name it with --family {self.family}, or"
                " another format"
            )
        return self.family

    def variables_with(self, own_variables: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns the variables of the template: the recorded ones, and those that are given instead of or beside them.

        Raises ConfigError for what a renderer sets itself.
        """
        if clash := [name for name in own_variables if name in OWN]:
            raise ConfigError(f"chat_template_kwargs {clash[0]!r} is set for each conversation: {OWN[clash[0]]}")
        return {**self.chat_template_kwargs, **own_variables}


def recorded_format(folder: Path) -> RecordedFormat:
    """Returns the format that a checkpoint's run, or the command that taught a model, recorded.

    It need not be the one that the template suggests, as `--family` may have named another. Other folders record none.
    Raises RunFolderError for settings that cannot be read.
    """
    is_checkpoint = folder.resolve().parent.name == "checkpoints"
    path = folder.resolve().parents[1] / "config.yaml" if is_checkpoint else folder / "config.yaml"
    if not path.is_file():
        return RecordedFormat()
    from agentgym.yaml_text import parse_yaml  # here, because most models have no such file

    try:
        settings = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error}; name the chat format with --family") from error
    if not isinstance(settings, dict) or not (is_checkpoint or "agentgym" in settings):
        return RecordedFormat()
    family, variables = settings.get("family"), settings.get("chat_template_kwargs")
    return RecordedFormat(
        family=family if isinstance(family, str) else None,
        chat_template_kwargs=variables if isinstance(variables, dict) else {},
    )
