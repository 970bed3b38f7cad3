"""The parts of every training on recorded text: its model, its steps with an interrupt, and its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_type_hints

import agentgym
from agentgym.chat_templates.families import format_to_record, renderer_for
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.template_date import present_date
from agentgym.cli.options import read_mapping
from agentgym.cli.signals import interrupted_between_steps
from agentgym.cli.terminal import progress, say
from agentgym.errors import AgentGymError, ConfigError, nearest
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_name import model_folder
from agentgym.model.policy import backend_line, load_policy_on
from agentgym.trainers.sft.sft_folder import SftFolder
from agentgym.types import JSON, Task

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Pupil", "config_as_options", "open_pupil", "play_options", "recorded_settings", "run_steps"]

S = TypeVar("S", bound="DataclassInstance")
ABOUT = ("kind", "agentgym")
"""What the config.yaml of a run holds besides its settings."""


@dataclass(frozen=True)
class Pupil:
    """A model that learns, with its chat format."""

    source: Path
    """The folder of its first weights, with the tokenizer."""
    renderer: TemplateRenderer
    model: LanguageModel
    chat_format: dict[str, Any]
    """The settings of the chat format to record: `family`, `chat_template_kwargs`, and `date`, which is that of the
    template if it writes one, else the one that was given."""


class PupilOptions(Protocol):
    """The options of a command that teaches a model, as far as they name it and its chat format."""

    @property
    def model(self) -> str:
        """The name of the model."""

    @property
    def model_backend(self) -> str:
        """The code that computes it."""

    @property
    def family(self) -> str | None:
        """The chat format that was given."""

    @property
    def chat_template(self) -> str:
        """The file of the template that was given."""

    @property
    def chat_template_kwargs(self) -> Mapping[str, JSON]:
        """The variables of the template that were given."""

    @property
    def date(self) -> str | None:
        """The date that was given."""

    @property
    def device(self) -> str:
        """The device that it learns on."""

    @property
    def dtype(self) -> str:
        """The type of its weights."""


def open_pupil(options: PupilOptions) -> Pupil:
    """Loads the model that the options name, and says which code computes it."""
    source, date = model_folder(options.model, options.chat_template), options.date or present_date()
    variables = recorded_format(source).variables_with(options.chat_template_kwargs)
    renderer = renderer_for(source, options.family, date=date, variables=variables)
    model = load_policy_on(options.device, source, dtype=options.dtype, backend=options.model_backend)
    if line := backend_line(model, source):
        say(line)
    family, written = format_to_record(renderer, options.family, date=date, given_date=options.date)
    return Pupil(source, renderer, model, {"family": family, "chat_template_kwargs": variables, "date": written})


def run_steps(
    pupil: Pupil,
    folder: SftFolder,
    num_steps: int,
    learn: Callable[[Callable[[S], None]], None],
    note: Callable[[S], str],
) -> bool:
    """Learns with a bar of so many steps, and saves the model however it ends; returns True if it was interrupted.

    `learn` takes the function that is called after each step, `note` gives the text next to the bar.
    """
    num_done = 0
    try:
        with progress("steps", num_steps) as count, interrupted_between_steps() as check:

            def on_step(step: S) -> None:
                nonlocal num_done
                num_done += 1
                folder.write_metrics(step)
                count(note(step))
                check()

            learn(on_step)
    except KeyboardInterrupt:
        return True
    except AgentGymError:
        say(f"what was learned in {num_done} steps is in {folder.path}")
        raise
    finally:
        folder.save_model(pupil.model, pupil.source)
    return False


def config_as_options(kind: type[object], args: Sequence[str]) -> list[str]:
    """Returns the options with those of the YAML file after `--config` before them, so that later ones win.

    Raises ConfigError for a file that is none, and for settings that `kind`, the command's dataclass, does not have.
    """
    places = [index for index, arg in enumerate(args) if arg.partition("=")[0] == "--config"]
    if not places:
        return list(args)
    _, equals, value = args[places[-1]].partition("=")
    given = read_mapping(Path(value if equals else next(iter(args[places[-1] + 1 :]), "")))
    settings = {name: value for name, value in given.items() if name not in ABOUT}
    return [*_option_words(kind, settings, ""), *args]


def _option_words(kind: type[object], given: Mapping[str, object], where: str) -> Iterator[str]:
    """Yields the options that set the settings of a mapping."""
    hints = get_type_hints(kind)
    for name, value in given.items():
        if name not in hints:
            raise ConfigError(f"unknown setting {where + name!r}{nearest(name, hints) or '.'}")
        option = f"--{where}{name}".replace("_", "-")
        part = hints[name]
        if isinstance(part, type) and is_dataclass(part):
            if not isinstance(value, Mapping):
                raise ConfigError(f"setting {where + name!r} holds settings of its own, got {value!r}")
            yield from _option_words(part, value, f"{where}{name}.")
        elif isinstance(value, Mapping):
            yield from (option, *(f"{key}={json.dumps(item)}" for key, item in value.items()))
        elif isinstance(value, list):
            yield from (option, *map(str, value))
        elif isinstance(value, bool):
            yield option if value else f"--no-{where}{name}".replace("_", "-")
        else:
            yield f"{option}={value}"


def recorded_settings(kind: str, given: Mapping[str, object]) -> dict[str, JSON]:
    """Returns the settings of a command as config.yaml has them."""
    kept = {name: value for name, value in given.items() if name not in ("config", "output", "json")}
    plain: dict[str, JSON] = json.loads(
        json.dumps({"kind": kind, "agentgym": agentgym.__version__, **kept}, default=str)
    )
    return plain


def play_options(task: Task | None) -> str:
    """Returns the options that name a task's environment to another command."""
    if task is None:
        return "--env ID"
    keywords = "".join(f" {name}={json.dumps(value)}" for name, value in task.kwargs.items())
    return f"--env {task.env_id}" + (f" --env-kwargs{keywords}" if keywords else "")
