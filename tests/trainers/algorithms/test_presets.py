"""What an algo sets, what stands beside it and wins, and what cannot go together."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import yaml

from agentgym.errors import ConfigError, UnknownName
from agentgym.settings.config_class import config_from_mapping
from agentgym.settings.functions import with_settings
from agentgym.trainers import ADVANTAGES, AGGREGATIONS, LOSSES
from agentgym.trainers.algorithms.losses import loss_with
from agentgym.trainers.algorithms.presets import PRESETS
from agentgym.trainers.config import AdvantageConfig, TrainConfig
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig


@pytest.mark.parametrize("algo", [*PRESETS, *ADVANTAGES])
def test_every_algo_is_a_whole_configuration_that_survives_its_file(algo: str) -> None:
    taught = LearnerConfig(kl=KLConfig(coefficient=1.0))  # nothing else teaches where no token has an advantage
    learner = taught if algo in ("distill", "none") else LearnerConfig()
    config = resolve_config(TrainConfig(env="X", algo=algo, learner=learner))
    assert config.estimator in ADVANTAGES and config.learner.loss in LOSSES and config.aggregation in AGGREGATIONS
    assert resolve_config(config) == config
    fields = yaml.safe_load(yaml.safe_dump(asdict(config)))
    assert config_from_mapping(TrainConfig, fields) == config


@pytest.mark.parametrize("name", PRESETS)
def test_the_settings_of_a_preset_exist(name: str) -> None:
    preset = PRESETS[name]
    with_settings(name, ADVANTAGES[preset.advantage], preset.advantage_settings)
    loss_with(preset.loss, preset.loss_settings)
    assert preset.summary.endswith(".") and "20" in preset.summary


def test_the_loss_of_pairs_is_none_of_a_run_that_plays() -> None:
    config = TrainConfig(env="TextGame-v0", learner=LearnerConfig(loss="preference"))
    with pytest.raises(ConfigError, match="is of pairs of replies, which `agentgym dpo` learns from"):
        resolve_config(config)


def test_what_is_set_beside_an_algo_wins_and_the_rest_is_the_algos() -> None:
    config = resolve_config(TrainConfig(env="X", algo="gspo", aggregation="token-sum"))
    assert (config.aggregation, config.learner.loss, config.estimator) == ("token-sum", "gspo", "grpo")
    config = resolve_config(TrainConfig(env="X", algo="dapo", advantage=AdvantageConfig(name="rloo")))
    assert (config.estimator, config.learner.loss_settings) == ("rloo", {"clip_high": 0.28})
    learner = LearnerConfig(loss_settings={"clip_high": 0.2})
    assert resolve_config(TrainConfig(env="X", algo="dapo", learner=learner)).learner.loss_settings == {
        "clip_high": 0.2
    }
    other_loss = LearnerConfig(loss="cispo")
    assert resolve_config(TrainConfig(env="X", algo="dapo", learner=other_loss)).learner.loss_settings == {}


def test_another_algo_of_the_same_run_is_another_configuration() -> None:
    config = TrainConfig(env="X")
    assert resolve_config(replace(config, algo="ppo")).estimator == "gae"
    assert resolve_config(replace(config, algo="ppo")).learner.critic.trunk == "own"


def test_a_critic_stands_beside_an_advantage_that_takes_values_and_no_other() -> None:
    shared = LearnerConfig(critic=CriticConfig(trunk="shared"))
    assert resolve_config(TrainConfig(env="X", algo="turn_gae", learner=shared)).learner.critic.trunk == "shared"
    with pytest.raises(ConfigError, match="grpo takes no values, so a critic would learn for nothing"):
        resolve_config(TrainConfig(env="X", learner=shared))
    with pytest.raises(ConfigError, match="gae takes the values of a critic"):
        resolve_config(TrainConfig(env="X", algo="ppo", learner=LearnerConfig(critic=CriticConfig(trunk="none"))))


def test_a_greedy_baseline_needs_episodes_that_the_weights_of_the_step_play() -> None:
    with pytest.raises(ConfigError, match="remax plays a greedy episode of each task"):
        resolve_config(TrainConfig(env="X", algo="remax", max_staleness=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "critic.learning_rate must be above 0"),
        ({"coefficient": 0.0}, "critic.coefficient must be above 0"),
        ({"clip": -1.0}, "critic.clip must be above 0, or null"),
        ({"warmup_steps": -1}, "critic.warmup_steps must be at least 0"),
        ({"trunk": "shared", "warmup_steps": 2}, "learns with the policy"),
    ],
)
def test_critics_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CriticConfig(**settings)  # type: ignore[arg-type]


def test_an_unknown_algo_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'ppo'"):
        resolve_config(TrainConfig(env="X", algo="ppoo"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gdpo", "gdpo gives the same advantages whatever KL penalty is taken off the rewards"),
        ("maxrl", "maxrl cannot credit rewards that a KL penalty is taken off"),
    ],
)
def test_a_penalty_in_the_reward_is_refused_where_it_is_lost_or_not_credited(name: str, message: str) -> None:
    kl = KLConfig(coefficient=0.1, penalty="k1", place="reward")
    with pytest.raises(ConfigError, match=message):
        resolve_config(TrainConfig(env="X", algo=name, learner=LearnerConfig(kl=kl)))
    assert (
        resolve_config(TrainConfig(env="X", algo=name, learner=LearnerConfig(kl=replace(kl, place="loss")))).estimator
        == name
    )


def test_a_horizon_shorter_than_a_step_can_bear_is_refused_before_anything_is_played() -> None:
    kl = KLConfig(coefficient=0.1, target=0.1, horizon=2)
    with pytest.raises(ConfigError, match=r"kl\.horizon is 2 episodes, and a step of 10 would take the KL coefficient"):
        resolve_config(TrainConfig(env="X", tasks=5, group_size=2, learner=LearnerConfig(kl=kl)))
    assert TrainConfig(env="X", tasks=4, group_size=2, learner=LearnerConfig(kl=kl)).learner.kl is kl
    assert kl.controller().update(0.0, 8).coefficient > 0
    with pytest.raises(ConfigError, match="needs a horizon above 2"):
        kl.controller().update(0.0, 10)
