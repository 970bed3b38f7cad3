"""Opens a training run: its model, its settings, its folder and its tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from agentgym.chat_templates.families import format_to_record, open_renderer
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.template_date import present_date
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_name import is_model_id, model_folder, revised_name
from agentgym.model.policy import empty_policy
from agentgym.model.transformers_check import check_forward
from agentgym.rewards import RewardFunction
from agentgym.trainers.checkpoints.checkpoint import Checkpoint
from agentgym.trainers.checkpoints.random_states import random_states
from agentgym.trainers.checkpoints.run_copy import fetch_missing_run
from agentgym.trainers.checkpoints.run_folder import RunFolder, read_settings, recorded_run_date
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.reference import check_teacher
from agentgym.trainers.lessons.config import LessonConfig
from agentgym.trainers.lessons.lesson import Lesson, open_lesson
from agentgym.trainers.loop.observer import Observer
from agentgym.trainers.loop.run import Run
from agentgym.trainers.loop.run_tasks import held_out_source, open_tasks
from agentgym.trainers.loop.session import Progress
from agentgym.trainers.loop.token_budget import with_token_budget
from agentgym.trainers.monitoring.instruments import Instruments
from agentgym.trainers.monitoring.watch import CollapseWatch
from agentgym.trainers.parts.engine import check_model_settings, model_of_run, with_pass_tokens
from agentgym.trainers.resolve import inapplicable_symptoms, with_optimizer
from agentgym.trainers.trackers import Tracking

__all__ = ["open_run"]


def open_run(
    config: TrainConfig,
    path: Path,
    observer: Observer,
    reward: RewardFunction | None = None,
    *,
    resume: bool = False,
) -> Run:
    """Returns the run in the folder `path` at its newest checkpoint, or a new one, whose settings are recorded there.

    Raises for environments, files and models that do not exist before anything is written.
    """
    if resume:
        fetch_missing_run(path, config.checkpoint.copy_to)
    config, first_folder = _find_model(config, path if resume else None)
    config, renderer = _open_format(config, first_folder, path if resume else None)
    lesson: Lesson[object] | None = None
    if isinstance(config, LessonConfig):
        sizes = empty_policy(first_folder, backend=config.model_backend)
        lesson, config = open_lesson(config, renderer, sizes)
    config = with_optimizer(config, first_folder, path if resume else None)
    config = with_token_budget(config, is_resumed=resume)
    check_teacher(config.learner.kl.reference, first_folder)
    source, config = open_tasks(config, renderer)
    tracking = Tracking(config.trackers, config.tracking)
    config, folder, checkpoint, model = _open_folder(config, path, first_folder, resume=resume)
    if checkpoint:
        source.load(checkpoint.tasks)
    recorded: list[dict[str, Any]] = folder.steps() if resume else []
    return Run(
        config=config,
        folder=folder,
        checkpoint=checkpoint,
        model_folder=first_folder,
        model=model,
        renderer=renderer,
        source=source,
        held_out=held_out_source(config, source),
        lesson=lesson,
        reward=reward,
        instruments=Instruments(config, renderer, tracking, folder.path, model),
        watch=CollapseWatch(config.collapse, recorded, inapplicable_symptoms(config)),
        observer=observer,
        progress=Progress(
            step=checkpoint.step if checkpoint else 0,
            train_s=float(cast(float, recorded[-1]["elapsed_s"])) if recorded else 0.0,
            random=random_states(),
        ),
    )


def _open_format(config: TrainConfig, folder: Path, resumed: Path | None) -> tuple[TrainConfig, Renderer]:
    """Returns the renderer of the model of a folder, and the settings that make it again."""
    date = config.date or (recorded_run_date(resumed) if resumed else None) or present_date()
    variables = recorded_format(folder).variables_with(config.chat_template_kwargs)
    renderer = open_renderer(folder, config.family, date=date, variables=variables)
    family, written = format_to_record(renderer, config.family, date=date, given_date=config.date)
    return replace(config, family=family, date=written, chat_template_kwargs=variables), renderer


def _open_folder(
    config: TrainConfig, path: Path, first_folder: Path, *, resume: bool
) -> tuple[TrainConfig, RunFolder, Checkpoint | None, LanguageModel]:
    """Returns the run's settings, its folder, a new one or that which is resumed, its checkpoint and its model."""
    if resume:
        folder, checkpoint = RunFolder.reopen(path, config)
        weights = checkpoint.path if checkpoint and not config.adapts_in_place else first_folder
        return config, folder, checkpoint, model_of_run(weights, config)
    model = model_of_run(first_folder, config)
    check_forward(model, first_folder)
    check_model_settings(model, config)
    config = with_pass_tokens(config, model)
    return config, RunFolder.create(path, config), None, model


def _find_model(config: TrainConfig, resumed: Path | None) -> tuple[TrainConfig, Path]:
    """Returns the folder of the first weights, and the settings with the commit of a model of the hub.

    A run that is resumed keeps its commit, unless another one is named.
    """
    if resumed is not None and is_model_id(config.model):
        recorded = str(read_settings(resumed).get("model"))
        config = replace(config, model=recorded) if recorded.startswith(f"{config.model}@") else config
    folder = model_folder(config.model)
    config = replace(config, model=revised_name(config.model, folder))
    return config, model_folder(config.model, config.chat_template) if config.chat_template else folder
