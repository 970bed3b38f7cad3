"""The tasks of a run: those of its environments, or the rows of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import cast

from agentgym.chat_templates.protocol import Renderer
from agentgym.data import open_data
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import ConfigError
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.self_play import trained_seats
from agentgym.trainers.tasks import (
    AheadTasks,
    EnvChoice,
    EnvTasks,
    MixedTasks,
    PracticeConfig,
    TaskSource,
    env_choices,
    fixed_source,
    make_source,
    own_sampler,
)
from agentgym.types import JSON, Message, Task

__all__ = ["held_out_source", "open_tasks", "played_choices"]


def open_tasks(config: TrainConfig, renderer: Renderer) -> tuple[TaskSource, TrainConfig]:
    """Returns the task source of a run, and its settings with the steps of `epochs`.

    Raises for environments that do not exist and files that cannot be read.
    """
    trained_seats(config)
    for choice in _held_out_choices(config):
        resolve_env(choice.env, choice.kwargs)
    source, num_rows = _source(config, renderer)
    if config.epochs is not None and not config.is_lesson:
        config = replace(config, steps=max(1, ceil(config.epochs * num_rows / config.tasks)))
    if config.practice.sampler is not None:
        source = own_sampler(config.practice.sampler, source, config.seed)
    return AheadTasks(source, config.tasks) if config.max_staleness else source, config


def played_choices(config: TrainConfig) -> list[EnvChoice]:
    """Returns the environments that a run plays: those that it learns from, or of a lesson those of its evaluations."""
    if config.is_lesson and not config.plays:
        return []
    if config.is_lesson and config.eval.mix:
        return _held_out_choices(config)
    return env_choices(config.practice, config.env, cast(Mapping[str, JSON], config.env_kwargs))


def held_out_source(config: TrainConfig, source: TaskSource) -> TaskSource:
    """Returns the source of the held-out tasks: that of training, or the environments of `eval.mix`."""
    if not config.eval.mix:
        return source
    choices = _held_out_choices(config)
    sources = {choice.name: EnvTasks(choice.env, config.seed, choice.kwargs) for choice in choices}
    return MixedTasks(sources, [choice.weight for choice in choices], tasks_per_step=1)


def _held_out_choices(config: TrainConfig) -> list[EnvChoice]:
    return env_choices(PracticeConfig(mix=config.eval.mix), "", {}) if config.eval.mix else []


def _source(config: TrainConfig, renderer: Renderer) -> tuple[TaskSource, int]:
    """Returns the source that the settings describe, and the number of rows of data to train on."""
    env_kwargs = cast(Mapping[str, JSON], config.env_kwargs)
    if config.is_lesson:
        return EnvTasks(config.env, config.seed, env_kwargs), 0
    if config.data.has_files:
        return _of_data(config, renderer, env_kwargs)
    for choice in env_choices(config.practice, config.env, env_kwargs):
        resolve_env(choice.env, choice.kwargs)
    return make_source(config.practice, config.env, env_kwargs, run_seed=config.seed, tasks_per_step=config.tasks), 0


def _of_data(config: TrainConfig, renderer: Renderer, env_kwargs: Mapping[str, JSON]) -> tuple[TaskSource, int]:
    def count(messages: Sequence[Message]) -> int:
        return len(renderer.render(messages, ()))

    data = open_data(config.data, count, config.env)
    if not data.train:
        raise ConfigError("the data holds no tasks to train on: name them with data.train (--data.train FILE)")
    if config.eval.episodes and not (data.eval or config.eval.mix):
        raise ConfigError(
            "the data holds no tasks to evaluate on: name them with data.eval (--data.eval FILE), hold some out with"
            " data.eval_fraction (--data.eval-fraction 0.1), or set eval.episodes to 0"
        )
    data.log_report()
    for env in data.env_ids:
        resolve_env(env, env_kwargs if env == config.env else {})

    def own(task: Task) -> Task:
        return replace(task, kwargs=dict(env_kwargs)) if env_kwargs and task.env_id == config.env else task

    train, held_out = (tuple(map(own, tasks)) for tasks in (data.train, data.eval))
    source = fixed_source(config.practice, train, held_out, run_seed=config.seed, shuffle=config.data.shuffle)
    return source, len(train)
