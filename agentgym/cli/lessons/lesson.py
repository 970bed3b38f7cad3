"""The parts of every training on recorded text: its model, its steps with an interrupt, and its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import agentgym
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.template_date import present_date
from agentgym.cli.signals import interrupted_between_steps
from agentgym.cli.terminal import progress, say
from agentgym.errors import AgentGymError
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_name import model_folder
from agentgym.model.policy import backend_line, load_policy
from agentgym.trainers.sft.sft_folder import SftFolder
from agentgym.types import JSON, Task

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Pupil", "open_pupil", "play_options", "recorded_settings", "run_steps"]

S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True)
class Pupil:
    """A model that learns, with its chat format."""

    source: Path
    """The folder of its first weights, with the tokenizer."""
    renderer: TemplateRenderer
    model: LanguageModel
    date: str | None
    """The date to record: that of the chat template if it writes one, else the one that was given."""


def open_pupil(name: str, family: str | None, date: str | None) -> Pupil:
    """Loads the model of a name, and says which code computes it."""
    source, written = model_folder(name), date or present_date()
    renderer, model = renderer_for(source, family, date=written), load_policy(source)
    if line := backend_line(model, source):
        say(line)
    return Pupil(source, renderer, model, written if renderer.tokenizer.writes_date else date)


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


def recorded_settings(kind: str, given: Mapping[str, object]) -> dict[str, JSON]:
    """Returns the settings of a command as config.yaml has them."""
    kept = {name: value for name, value in given.items() if name not in ("output", "json")}
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
