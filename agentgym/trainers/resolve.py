"""The settings of a run with those of its algorithm, checked by trying the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentgym.errors import ConfigError
from agentgym.model.model_folder import count_parameters
from agentgym.settings.functions import is_bundled
from agentgym.trainers.algorithms.aggregation import AGGREGATIONS, check_aggregation
from agentgym.trainers.algorithms.estimators import check_estimator, check_penalized, needs_groups, needs_input
from agentgym.trainers.algorithms.losses import LOSSES, traits_of
from agentgym.trainers.algorithms.optimizers import schedule_share
from agentgym.trainers.algorithms.presets import preset_of
from agentgym.trainers.checkpoints.run_folder import read_settings
from agentgym.trainers.config import AdvantageConfig, TrainConfig
from agentgym.trainers.learner.objective import policy_loss
from agentgym.trainers.learner.optimizer import check_optimizer
from agentgym.trainers.settings.collapse import SYMPTOMS, SymptomName
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["inapplicable_symptoms", "resolve_config", "with_optimizer"]

S = TypeVar("S", OptimizerConfig, LearnerConfig)
NO_ADVANTAGE = "none"
"""The estimator that credits nothing."""
OF_ANY_UPDATE: tuple[SymptomName, ...] = ("nan", "gradient_exploded", "merge_lost")
"""The symptoms of collapse that need no episodes."""


def inapplicable_symptoms(config: TrainConfig) -> tuple[SymptomName, ...]:
    """Returns the symptoms of collapse that are none in a run with these settings."""
    if config.is_lesson:
        return tuple(name for name in SYMPTOMS if name not in OF_ANY_UPDATE)
    without_signal: tuple[SymptomName, ...] = ("dead_groups", "solved") if config.estimator == NO_ADVANTAGE else ()
    return (*without_signal, *(("kl_exploded",) if config.learner.kl.reference is not None else ()))


def resolve_config(config: TrainConfig, *, is_resumed: bool = False) -> TrainConfig:
    """Returns the same run with explicit values for all settings that the algo sets.

    The estimator, loss, correction, KL penalty and aggregation are tried on a few tokens. Raises UnknownName for one
    that does not exist, and ConfigError for settings that it does not have, or that do not go together.
    """
    learner = config.learner
    if learner.lora.rank and learner.lora.seed is None:
        config = replace(config, learner=replace(learner, lora=replace(learner.lora, seed=config.seed)))
    config = config if config.is_lesson else _with_algorithm(config)
    policy_loss(config.learner)
    optimizer = config.optimizer
    check_optimizer(optimizer, is_resumed=is_resumed)
    total_steps = max(1, config.steps)
    for step in (0, total_steps - 1):
        position = {"step": step, "total_steps": total_steps, "warmup_steps": optimizer.warmup_steps or 0}
        schedule_share(optimizer.decay, optimizer.decay_settings, position)
    if not config.is_lesson:
        _check_algorithm(config)
    if config.executor == "ray":
        _check_own_ranks(config)
    return config


def _with_algorithm(config: TrainConfig) -> TrainConfig:
    """Returns the run with the values of the settings that the algo sets."""
    preset, advantage, learner = preset_of(config.algo), config.advantage, config.learner
    if advantage.name is None:
        settings = preset.advantage_settings if advantage.settings is None else advantage.settings
        advantage = AdvantageConfig(name=preset.advantage, settings=settings)
    elif advantage.settings is None:
        advantage = replace(advantage, settings={})
    if learner.loss is None:
        settings = preset.loss_settings if learner.loss_settings is None else learner.loss_settings
        learner = replace(learner, loss=preset.loss, loss_settings=settings)
    elif learner.loss_settings is None:
        learner = replace(learner, loss_settings={})
    if learner.critic.trunk is None:
        takes_values = needs_input(advantage.name or "", "values_BT")
        learner = replace(learner, critic=replace(learner.critic, trunk="own" if takes_values else "none"))
    if traits_of(LOSSES[learner.loss_name]).against_reference:
        raise ConfigError(
            f"learner.loss {learner.loss_name!r} is of pairs of replies, which `agentgym dpo` learns from: leave it out"
        )
    aggregation = config.aggregation or preset.aggregation
    practice = replace(config.practice, filter=config.practice.filter or preset.filter)
    return replace(config, advantage=advantage, learner=learner, aggregation=aggregation, practice=practice)


def with_optimizer(config: TrainConfig, folder: Path, resumed: Path | None = None) -> TrainConfig:
    """Returns the run with the optimizer and the rate of the run that is resumed, or else that its model usually has.

    `folder` is that of the model. Settings that are given stay. A resumed run keeps its micro-batches too.
    """
    optimizer, learner = config.optimizer, config.learner
    if resumed is not None:
        recorded = read_settings(resumed)
        optimizer = _with_recorded(optimizer, recorded.get("optimizer"), "name", "learning_rate")
        learner = _with_recorded(learner, recorded.get("learner"), "micro_batch_tokens")
    config = replace(config, optimizer=optimizer, learner=learner)
    return replace(config, optimizer=config.optimizer_for(count_parameters(folder)))


def _with_recorded(settings: S, recorded: object, *names: str) -> S:
    """Returns the settings, with the recorded ones for those of the names that are None."""
    values = recorded if isinstance(recorded, Mapping) else {}
    missing: dict[str, Any] = {name: values.get(name) for name in names if getattr(settings, name) is None}
    return replace(settings, **missing)


def _check_algorithm(config: TrainConfig) -> None:
    name, critic = config.estimator, config.learner.critic
    if name == NO_ADVANTAGE and not config.learner.kl.coefficient:
        raise ConfigError(
            "with the advantage none nothing is learned from rewards, so something else has to teach: a teacher"
            " (learner.kl.reference MODEL, learner.kl.coefficient 1, learner.kl.penalty jsd)"
        )
    check_estimator(name, config.advantage.settings or {})
    _check_kl(config, name)
    if needs_input(name, "values_BT") is not critic.exists:
        raise ConfigError(
            f"the advantage {name} takes the values of a critic: learner.critic.trunk is own or shared"
            if not critic.exists
            else f"the advantage {name} takes no values, so a critic would learn for nothing: leave"
            " learner.critic.trunk out, or take --algo ppo"
        )
    if needs_input(name, "greedy_B") and (config.is_played_outside or config.max_staleness):
        raise ConfigError(
            f"{name} plays a greedy episode of each task with the weights of the step: leave serve, agent"
            " and max_staleness out"
        )
    if config.group_size == 1 and not config.allow_single and needs_groups(name):
        raise ConfigError(
            f"group_size 1 has no baseline: {name} would give every episode an advantage of 0."
            " Use 2 or more (8 is usual), or allow_single to accept it"
        )
    _check_aggregation(config, config.aggregation or "")


def _check_own_ranks(config: TrainConfig) -> None:
    """Raises ConfigError for ranks of a reference or a critic that the run does not have, or cannot have there."""
    kl, critic = config.learner.kl, config.learner.critic
    if config.ray.references:
        if not kl.coefficient:
            raise ConfigError("ray.references are ranks of the reference of learner.kl, and its coefficient is 0")
        if kl.compares_whole:
            raise ConfigError(
                "learner.kl.penalty jsd compares whole distributions, which do not travel: leave ray.references out, or"
                " take a penalty of the sampled ids, such as k3"
            )
        if config.learner.lora.rank and kl.reference is None:
            raise ConfigError(
                "with learner.lora the learner's ranks have the first weights anyway: leave ray.references out, or"
                " name another model with learner.kl.reference"
            )
    if config.ray.critics and critic.trunk != "own":
        have = "the critic is on the policy's trunk" if critic.exists else f"{config.estimator} takes no critic"
        raise ConfigError(f"ray.critics are ranks of a critic with a backbone of its own, and {have}: leave them out")


def _check_kl(config: TrainConfig, name: str) -> None:
    kl = config.learner.kl
    if kl.coefficient and kl.place == "reward":
        check_penalized(name, config.advantage.settings or {})
    if kl.target is not None and kl.horizon * 5 <= config.episodes_per_step:
        raise ConfigError(
            f"kl.horizon is {kl.horizon} episodes, and a step of {config.episodes_per_step} would take the KL"
            f" coefficient to 0 or below: use more than {config.episodes_per_step // 5} (10000 is usual)"
        )


def _check_aggregation(config: TrainConfig, name: str) -> None:
    takes_constant = name == "seq-mean-token-sum-norm" or not is_bundled(AGGREGATIONS[name])
    if config.norm_tokens is not None and not takes_constant:
        raise ConfigError(
            f"norm_tokens is the constant of the aggregation seq-mean-token-sum-norm, and this one is {name}: leave"
            " norm_tokens out, or add --aggregation seq-mean-token-sum-norm"
        )
    check_aggregation(name, config.norm_tokens or (1 if name == "seq-mean-token-sum-norm" else None))
