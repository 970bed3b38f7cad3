"""Opens a training run: its model, its settings, its folder and its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from agentgym.model.language_model import LanguageModel
from agentgym.model.transformers_check import check_forward
from agentgym.rewards import RewardFunction
from agentgym.trainers.checkpoints.checkpoint import Checkpoint
from agentgym.trainers.checkpoints.random_states import random_states
from agentgym.trainers.checkpoints.run_copy import fetch_missing_run
from agentgym.trainers.checkpoints.run_folder import RunFolder
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.observer import Observer
from agentgym.trainers.loop.resolve_run import resolve_run
from agentgym.trainers.loop.run import Run
from agentgym.trainers.loop.run_tasks import held_out_source
from agentgym.trainers.loop.session import Progress
from agentgym.trainers.monitoring.instruments import Instruments
from agentgym.trainers.monitoring.watch import CollapseWatch
from agentgym.trainers.parts.engine import check_model_settings, model_of_run, with_pass_tokens
from agentgym.trainers.resolve import inapplicable_symptoms
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
    run = resolve_run(config, path if resume else None)
    config, source = run.config, run.source
    tracking = Tracking(config.trackers, config.tracking)
    config, folder, checkpoint, model = _open_folder(config, path, run.model_folder, resume=resume)
    if checkpoint:
        source.load(checkpoint.tasks)
    recorded: list[dict[str, Any]] = folder.steps() if resume else []
    return Run(
        config=config,
        folder=folder,
        checkpoint=checkpoint,
        model_folder=run.model_folder,
        model=model,
        renderer=run.renderer,
        source=source,
        held_out=held_out_source(config, source),
        lesson=run.lesson,
        reward=reward,
        instruments=Instruments(config, run.renderer, tracking, folder.path, model),
        watch=CollapseWatch(config.collapse, recorded, inapplicable_symptoms(config)),
        observer=observer,
        progress=Progress(
            step=checkpoint.step if checkpoint else 0,
            train_s=float(cast(float, recorded[-1]["elapsed_s"])) if recorded else 0.0,
            random=random_states(),
        ),
    )


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
