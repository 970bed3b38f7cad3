"""Resolves the settings of a run: what its algorithm, model, environments and data decide where nothing is set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from agentgym.chat_templates.families import format_to_record, open_renderer
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.template_date import present_date
from agentgym.chat_templates.template_folder import chat_folder
from agentgym.model.model_name import is_model_id, model_folder, revised_name
from agentgym.model.policy import empty_policy
from agentgym.trainers.checkpoints.run_folder import read_settings, recorded_run_date
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.reference import check_teacher
from agentgym.trainers.lessons.config import LessonConfig
from agentgym.trainers.lessons.lesson import Lesson, open_lesson
from agentgym.trainers.loop.run_tasks import open_tasks
from agentgym.trainers.loop.token_budget import with_token_budget
from agentgym.trainers.resolve import with_optimizer
from agentgym.trainers.tasks import TaskSource

__all__ = ["ResolvedRun", "resolve_run"]


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose settings all have values, with what was opened to find them."""

    config: TrainConfig
    model_folder: Path
    """The folder of the first weights."""
    renderer: Renderer
    source: TaskSource
    lesson: Lesson[object] | None = None
    """The rows that are learned from in place of episodes, for a run of `sft` or `dpo`."""


def resolve_run(config: TrainConfig, resumed: Path | None = None) -> ResolvedRun:
    """Resolves the settings of a new run, or of one that is resumed in the folder `resumed`; writes nothing.

    A resumed run keeps what is recorded of it: the commit of its model, its date, its optimizer and its micro-batches.
    Raises for environments, files and models that do not exist, and for settings that do not go together.
    """
    config, folder = _find_model(config, resumed)
    config, renderer = _open_format(config, folder, resumed)
    lesson: Lesson[object] | None = None
    if isinstance(config, LessonConfig):
        model = empty_policy(folder, backend=config.model_backend)
        lesson, config = open_lesson(config, renderer, model, is_resumed=resumed is not None)
    config = with_token_budget(with_optimizer(config, folder, resumed), is_resumed=resumed is not None)
    check_teacher(config.learner.kl.reference, folder)
    source, config = open_tasks(config, renderer)
    return ResolvedRun(config, folder, renderer, source, lesson)


def _find_model(config: TrainConfig, resumed: Path | None) -> tuple[TrainConfig, Path]:
    """Returns the folder of the first weights, and the settings with the commit or the digest of its model.

    A run that is resumed keeps its commit, unless another one is named.
    """
    if resumed is not None and is_model_id(config.model):
        recorded = str(read_settings(resumed).get("model"))
        config = replace(config, model=recorded) if recorded.startswith(f"{config.model}@") else config
    folder = model_folder(config.model)
    config = replace(config, model=revised_name(config.model, folder))
    return config, chat_folder(config.model, config.chat_template) if config.chat_template else folder


def _open_format(config: TrainConfig, folder: Path, resumed: Path | None) -> tuple[TrainConfig, Renderer]:
    """Returns the renderer of the model of a folder, and the settings that make it again."""
    date = config.date or (recorded_run_date(resumed) if resumed else None) or present_date()
    variables = recorded_format(folder).variables_with(config.chat_template_kwargs)
    renderer = open_renderer(folder, config.family, date=date, variables=variables)
    family, written = format_to_record(renderer, config.family, date=date, given_date=config.date)
    return replace(config, family=family, date=written, chat_template_kwargs=variables), renderer
