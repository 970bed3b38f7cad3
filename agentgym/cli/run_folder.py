"""The tokenizer, chat format and date that a run was made with, from its `config.yaml`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agentgym.chat_templates.families import open_renderer
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.template_folder import chat_folder
from agentgym.cli.options import path_after
from agentgym.errors import AgentGymError, ConfigError, RunFolderError
from agentgym.loading import is_code_path
from agentgym.yaml_text import parse_yaml

__all__ = [
    "custom_renderer_of_run",
    "model_folder_of_run",
    "names_tasks",
    "open_here",
    "own_code_options",
    "renderer_of_run",
    "resumed_config",
    "settings_of_run",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

KEYS = ("tokenizer", "model")
"""The keys of `config.yaml` that name a model folder, or `embedded`; the first one present counts."""


class OpenOfRun(Protocol[T_co]):
    """Opens a part of a run, such as its renderer; `tokenizer` is a model folder that is used instead of its own."""

    def __call__(self, run: Path, tokenizer: str | None = None, *, may_fetch: bool = True) -> T_co | None: ...


def open_here(part: OpenOfRun[T], run: Path, tokenizer: str | None) -> tuple[T | None, str]:
    """Opens a part of a run without a request to the address that the run names, which may be anybody's.

    Returns it and "", or None and the reason if the run's model is not on this machine.
    """
    if tokenizer:
        return part(run, tokenizer), ""
    settings_of_run(run)  # raises for settings that cannot be read
    try:
        return part(run, may_fetch=False), ""
    except RunFolderError as error:
        return None, f"{error}; --tokenizer FOLDER names another one"


def model_folder_of_run(run: Path, tokenizer: str | None = None, *, may_fetch: bool = True) -> Path | None:
    """Returns the folder of the run's tokenizer, or `tokenizer`; None if the run does not name one.

    Raises RunFolderError when the named folder does not exist any more, or is fetched only, without `may_fetch`.
    """
    settings = settings_of_run(run)
    name = tokenizer or next((settings[key] for key in KEYS if isinstance(settings.get(key), str)), None)
    template = "" if tokenizer else str(settings.get("chat_template") or "")
    return None if name is None else chat_folder(name, template, may_fetch=may_fetch)


def custom_renderer_of_run(run: Path) -> str | None:
    """Returns the place of the code that the run renders with; None if it is a renderer of ours."""
    family = settings_of_run(run).get("family")
    return family if isinstance(family, str) and is_code_path(family) else None


def renderer_of_run(run: Path, tokenizer: str | None = None, *, may_fetch: bool = True) -> Renderer | None:
    """Returns the renderer of the run, or of the model folder `tokenizer`; None if the run does not name one.

    A renderer of the user's own is code that this runs. Raises RunFolderError when it, or the named folder, cannot be
    opened any more.
    """
    folder = model_folder_of_run(run, tokenizer, may_fetch=may_fetch)
    if folder is None:
        return None
    settings = settings_of_run(run)
    family, date = (str(settings[key]) if settings.get(key) else None for key in ("family", "date"))
    try:
        return open_renderer(folder, family, date=date, variables=settings.get("chat_template_kwargs"))
    except AgentGymError as error:
        if family is None or not is_code_path(family):
            raise
        raise RunFolderError(
            f"the run's renderer {family!r} cannot be opened; run the command where the run was started: {error}"
        ) from error


def own_code_options(family: str | None, model_backend: str) -> str:
    """Returns the options that name a renderer and a model class of the user's own to another command."""
    values = {"family": family or "", "model-backend": model_backend}
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in values.items() if is_code_path(value))


def settings_of_run(run: Path) -> Mapping[str, Any]:
    """Returns the settings in the run's `config.yaml`; empty if there is no such file."""
    config = run / "config.yaml"
    if not config.is_file():
        return {}
    try:
        settings = _parse_settings(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{str(config)!r} cannot be read: {error}; name the model with --tokenizer") from error
    return settings if isinstance(settings, Mapping) else {}


@lru_cache(maxsize=1)
def _parse_settings(text: str) -> object:
    """Returns the value of a YAML text; a command reads the same one several times, which takes 10 ms each."""
    return parse_yaml(text)


def names_tasks(args: Sequence[str]) -> bool:
    """Returns True if the options name an environment or data."""
    return any(arg.partition("=")[0] == "--env" or arg.startswith("--data.") for arg in args)


def resumed_config(args: Sequence[str]) -> Path | None:
    """Returns the config.yaml of the run that `--resume` goes on with, or None without that option.

    Raises ConfigError if no folder is named, and RunFolderError if it holds no run.
    """
    folder = path_after("--output", args)
    if "--resume" not in args:
        return None
    if folder is None:
        raise ConfigError("--resume goes on in a run's folder: name it with --output")
    if not (folder / "config.yaml").is_file():
        raise RunFolderError(f"{str(folder)!r} holds no run to go on with: it has no config.yaml")
    return folder / "config.yaml"
