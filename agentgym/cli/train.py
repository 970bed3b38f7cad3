"""`agentgym train`: trains a model on environments, and reports the result."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import tyro

from agentgym.cli.options import (
    env_as_option,
    mix_as_options,
    parse_options,
    path_after,
    profile_as_options,
    read_mapping,
    text_after,
    with_full_names,
)
from agentgym.cli.run_folder import names_tasks, resumed_config
from agentgym.cli.terminal import say
from agentgym.cli.training.options import MAIN_SETTINGS, TrainOptions
from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_from_mapping
from agentgym.tools.sandbox.service_settings import used_by_run
from agentgym.trainers.checkpoints.run_copy import fetch_missing_run
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.former_settings import with_current_names
from agentgym.trainers.tasks.mix import read_mix

__all__ = ["main", "refuse_torchrun"]

logger = logging.getLogger(__name__)
SHORT_NAMES = {"--tools": "--data.tools", "--env-processes": "--sampler.env-processes", "--agent": "--agent.name"}
"""Options that other commands have without a prefix."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym train ...`."""
    refuse_torchrun("train")
    args = profile_as_options(mix_as_options(with_full_names(env_as_option(args), SHORT_NAMES)))
    _fetch_run(args)
    options = parse_options(
        TrainOptions, args, prog="agentgym train", default=_defaults(args), main_options=MAIN_SETTINGS
    )
    # Here, and not above: help and mistakes need no torch.
    from agentgym.cli.training import run as training_run

    with used_by_run(options.run.sandbox):
        training_run.check_algorithm_and_envs(options.run, is_resumed=options.resume)
        if options.print_config:
            return training_run.print_config(options.run)
        if options.dry_run:
            return training_run.print_plan(options)
        with training_run.open_trainer(options) as trainer:
            result = trainer.fit()
        return training_run.report(options.run, result, as_json=options.json)


def refuse_torchrun(command: str) -> None:
    """Raises ConfigError in one of several processes that torchrun has begun."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"{command} begins its ranks itself, and torchrun would begin as many runs: agentgym {command} --executor"
            f" ray --ray.learners {os.environ['WORLD_SIZE']} ..."
        )


def _defaults(args: Sequence[str]) -> TrainOptions | None:
    """Returns the settings of the file after `--config`, or of the run to resume if no tasks are named."""
    path = path_after("--config", args)
    if path is None and not names_tasks(args):
        path = resumed_config(args)
    if path is None:
        return None
    if not path.is_file():
        raise ConfigError(f"no configuration file {str(path)!r}; `agentgym train --env ID --print-config` shows one")
    settings = with_current_names(read_mapping(path), logger.warning)
    mixed = _mixed_envs(settings.get("practice"))
    has_tasks = bool(mixed) or bool({"env", "data"} & settings.keys())
    run = config_from_mapping(TrainConfig, {"env": next(iter(mixed), "" if has_tasks else "?"), **settings})
    if not has_tasks:
        object.__setattr__(run, "env", tyro.MISSING)  # no text: the option has to name it
    return TrainOptions(run=run, config=path)


def _fetch_run(args: Sequence[str]) -> None:
    """Fetches the copy of the run that is resumed, where its folder has none."""
    folder, address = path_after("--output", args), text_after("--checkpoint.copy-to", args)
    if "--resume" in args and folder is not None and fetch_missing_run(folder, address):
        say(f"fetched the run of {address} into {folder}")


def _mixed_envs(practice: object) -> list[str]:
    """Returns the environments of a file's mix; none for an invalid mix, which is reported when settings are read."""
    mix = practice.get("mix") if isinstance(practice, dict) else None
    return [entry.env for entry in read_mix(mix).values()] if isinstance(mix, dict) else []
