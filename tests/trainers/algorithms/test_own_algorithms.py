"""A user's functions, named by their place, train as the bundled ones do, or are refused before anything is played."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agentgym.errors import AgentGymError, ConfigError, TrainingHalted, UserCodeFault
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_PENALTIES, LOSSES
from agentgym.trainers.algorithms.aggregation import RowCounts, turn_weights
from agentgym.trainers.algorithms.kl import penalty_of
from agentgym.trainers.algorithms.losses import loss_with
from agentgym.trainers.checkpoints.run_folder import RunFolder
from agentgym.trainers.config import AdvantageConfig, TrainConfig
from agentgym.trainers.learner.objective import policy_loss
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig

OWN = """
import torch

from agentgym.trainers.algorithms.advantages import Credit, dr_grpo, gae
from agentgym.trainers.algorithms.aggregation import AGGREGATIONS
from agentgym.trainers.algorithms.corrections import Correction, tis_token
from agentgym.trainers.algorithms.kl import k3
from agentgym.trainers.algorithms.losses import PolicyLoss, ppo_clip
from agentgym.trainers.resolve import resolve_config


def centred(rewards_BT, mask_BT, groups_B, *, scale: float = 1.0):
    credit = dr_grpo(rewards_BT, mask_BT, groups_B, allow_single=True)
    return Credit(scale * credit.advantages_BT, credit.returns_BT)

def clipped(logp, old_logp, advantages, mask, *, sequences=None, scale: float = 1.0):
    found = ppo_clip(logp, old_logp, advantages, mask)
    return PolicyLoss(scale * found.loss, found.stats)

def penalty(logp, ref_logp):
    return k3(logp, ref_logp)

def by_token(rows, totals, norm_tokens):
    return AGGREGATIONS["token-mean"](rows, totals, norm_tokens)

def truncated(old_logp, sampled_logp, mask, *, sequences=None, cap: float = 2.0):
    return tis_token(old_logp, sampled_logp, mask, cap=cap)

def valued(rewards_BT, mask_BT, groups_B, values_BT, bootstrap_B):
    return gae(rewards_BT, mask_BT, groups_B, values_BT, bootstrap_B)

def all_of(rewards_BT, mask_BT, groups_B, values_BT, bootstrap_B, turns_BT, states_BT, greedy_B, proxy_BT):
    by_token = (rewards_BT, values_BT, turns_BT, states_BT, proxy_BT)
    assert all(one.shape == mask_BT.shape for one in by_token)
    assert groups_B.shape == bootstrap_B.shape == greedy_B.shape == mask_BT.shape[:1]
    return Credit(rewards_BT, rewards_BT)

def parts(rewards_BT, mask_BT, components_BTK):
    return Credit(components_BTK[:, :, 0] - components_BTK[:, :, 2], rewards_BT)

def bare(rewards_BT, mask_BT): return rewards_BT
def narrow(rewards_BT, mask_BT): return Credit(rewards_BT.sum(-1), rewards_BT.sum(-1))
def infinite(rewards_BT, mask_BT): return Credit(rewards_BT / 0, rewards_BT)
def failing(rewards_BT, mask_BT): raise ValueError("not today")
def halved(rewards_BT): return Credit(rewards_BT, rewards_BT[:4])
def lopsided(mask_BT, components_BTK): return Credit(components_BTK, components_BTK)
def summed(logp, old_logp, advantages, mask, *, sequences=None):
    return PolicyLoss(clipped(logp, old_logp, advantages, mask).loss.sum(), None)
def number(logp, old_logp, advantages, mask, *, sequences=None): return -(logp * advantages)
def detached(logp, old_logp, advantages, mask, *, sequences=None):
    return PolicyLoss(-logp.detach() * advantages, None)
def scalar(old_logp, sampled_logp, mask, *, sequences=None): return Correction(mask.sum(), mask)
def weights(old_logp, sampled_logp, mask, *, sequences=None): return mask.float()
def mean(logp, ref_logp): return (logp - ref_logp).mean()
def flat(rows, totals, norm_tokens): return [1.0 for _ in rows.turn_tokens_B]
def endless(rows, totals, norm_tokens): return [[float("inf")] * len(one) for one in rows.turn_tokens_B]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def run_of(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(json.loads(line)["loss"], json.loads(line)["grad_norm"]) for line in lines]


def own_run(own: Path, small_run: TrainConfig) -> TrainConfig:
    """The run whose every algorithm is one of the file's."""
    learner = LearnerConfig(
        loss=f"{own}:clipped",
        kl=KLConfig(penalty=f"{own}:penalty", coefficient=0.01),
        correction=f"{own}:truncated",
        correction_settings={"cap": 3.0},
    )
    return replace(small_run, algo=f"{own}:centred", aggregation=f"{own}:by_token", learner=learner)


@pytest.mark.slow
def test_a_users_functions_give_the_run_of_the_bundled_ones_that_they_call(
    own: Path, small_run: TrainConfig, train: Callable[..., Any], tmp_path: Path
) -> None:
    learner = LearnerConfig(kl=KLConfig(coefficient=0.01), correction="tis_token", correction_settings={"cap": 3.0})
    bundled = replace(small_run, algo="dr_grpo", aggregation="token-mean", learner=learner)
    train(bundled, tmp_path / "bundled")
    train(own_run(own, small_run), tmp_path / "own")
    assert len(run_of(tmp_path / "own")) == 2
    for mine, theirs in zip(run_of(tmp_path / "own"), run_of(tmp_path / "bundled"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_a_runs_file_names_the_places_and_is_resumed_from(
    own: Path, small_run: TrainConfig, train: Callable[..., Any], tmp_path: Path
) -> None:
    config = own_run(own, small_run)
    train(replace(config, steps=1), tmp_path / "run")
    recorded = config_from_mapping(TrainConfig, yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    assert (recorded.algo, recorded.learner.loss) == (f"{own}:centred", f"{own}:clipped")
    folder, checkpoint = RunFolder.reopen(tmp_path / "run", recorded)
    assert checkpoint is not None and checkpoint.step == 1 and folder.path == tmp_path / "run"
    result, _ = train(replace(recorded, steps=2), tmp_path / "run", resume=True)
    assert result.steps == 2 and len(run_of(tmp_path / "run")) == 2


@pytest.mark.slow
def test_an_estimator_of_a_users_that_takes_values_gets_a_critic(
    own: Path, small_run: TrainConfig, train: Callable[..., Any], tmp_path: Path
) -> None:
    config = replace(small_run, algo=f"{own}:valued")
    assert resolve_config(config).learner.critic.trunk == "own"
    train(config, tmp_path / "own")
    train(replace(small_run, algo="gae"), tmp_path / "bundled")
    assert run_of(tmp_path / "own") == run_of(tmp_path / "bundled")


def test_an_estimator_of_a_users_may_take_all_that_there_is_and_stand_in_a_preset(own: Path) -> None:
    assert resolve_config(TrainConfig(env="X", algo=f"{own}:all_of")).estimator == f"{own}:all_of"
    in_preset = resolve_config(TrainConfig(env="X", algo="gspo", advantage=AdvantageConfig(name=f"{own}:centred")))
    assert (in_preset.estimator, in_preset.learner.loss) == (f"{own}:centred", "gspo")
    assert resolve_config(TrainConfig(env="X", algo=f"{own}:parts")).estimator.endswith("parts"), (
        "it takes three components"
    )
    assert TrainConfig(env="X", algo="gdpo", advantage=AdvantageConfig(settings={"weights": [1.0, 2.0, 0.5]}))


def test_settings_of_a_users_function_are_given_and_checked_as_any(own: Path) -> None:
    config = resolve_config(
        TrainConfig(env="X", algo=f"{own}:centred", advantage=AdvantageConfig(settings={"scale": 2.0}))
    )
    assert config_from_mapping(TrainConfig, yaml.safe_load(yaml.safe_dump(asdict(config)))) == config
    with pytest.raises(ConfigError, match="no setting 'scael': did you mean 'scale'"):
        resolve_config(replace(config, advantage=AdvantageConfig(name=f"{own}:centred", settings={"scael": 2.0})))
    with pytest.raises(ConfigError, match=r"setting 'scale' of .* is float, got 'much'"):
        policy_loss(LearnerConfig(loss=f"{own}:clipped", loss_settings={"scale": "much"}))
    tensors = (torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]), torch.ones(2) > 0)
    assert loss_with(f"{own}:clipped", {"scale": 3.0})(*tensors).loss.tolist() == [-3.0, -1.5]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("bare", ConfigError, r"gives a Tensor, and Credit\(advantages_BT, returns_BT\) was wanted"),
        ("narrow", ConfigError, r"advantages of shape \(8,\), and one for each token of each episode"),
        ("infinite", TrainingHalted, "gives advantages of (inf|nan) at a trained token"),
        ("failing", UserCodeFault, "failed: ValueError: not today"),
        ("halved", ConfigError, r"returns of shape \(4, 4\), and one for each token of each episode"),
        ("lopsided", ConfigError, r"advantages of shape \(8, 4, 16\), and one for each token"),
        ("clipped", ConfigError, "'logp' is not an input"),
    ],
)
def test_an_estimator_that_cannot_work_is_refused_before_anything_is_played(
    own: Path, name: str, error: type[AgentGymError], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_config(TrainConfig(env="X", algo=f"{own}:{name}"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "summed"}, r"a loss of shape \(\), and one number for each token, \(4,\), was wanted"),
        ({"loss": "number"}, "gives a Tensor, and PolicyLoss"),
        ({"loss": "detached"}, "gives a loss without gradient"),
        ({"loss": "centred"}, "'rewards_BT' is not an input"),
        ({"correction": "scalar"}, r"gives weights of shape \(\), and one for each token, \(4,\), was wanted"),
        ({"correction": "weights"}, "gives a Tensor, and Correction"),
        ({"correction": "clipped"}, "is not an input"),
    ],
)
def test_a_loss_or_correction_that_cannot_work_is_refused(own: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_loss(LearnerConfig(**{key: f"{own}:{name}" for key, name in settings.items()}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"), [("mean", r"gives shape \(\), and a number for each token"), ("clipped", "is not an input")]
)
def test_a_penalty_that_cannot_work_is_refused(own: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_loss(LearnerConfig(kl=KLConfig(penalty=f"{own}:{name}")))


@pytest.mark.parametrize("name", ["flat", "endless"])
def test_an_aggregation_that_cannot_work_is_refused(own: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a finite weight for each turn of each row was wanted"):
        resolve_config(TrainConfig(env="X", aggregation=f"{own}:{name}"))


def test_an_aggregation_of_a_users_may_take_the_constant_that_is_refused_for_ours(own: Path) -> None:
    assert TrainConfig(env="X", aggregation=f"{own}:by_token", norm_tokens=64).norm_tokens == 64
    with pytest.raises(ConfigError, match="leave norm_tokens out"):
        resolve_config(TrainConfig(env="X", aggregation="token-mean", norm_tokens=64))


def test_inputs_that_do_not_fit_are_refused_for_a_users_function_too(own: Path) -> None:
    loss = loss_with(f"{own}:clipped", {})
    three = torch.zeros(3, requires_grad=True)
    with pytest.raises(AgentGymError, match="have one shape"):
        loss(three, torch.zeros(2), torch.zeros(3), torch.ones(3, dtype=torch.bool))
    assert penalty_of(f"{own}:penalty")(torch.tensor([-1.0]), torch.tensor([-1.0])).tolist() == [0.0]
    assert turn_weights(f"{own}:by_token", RowCounts((0,), ((1, 3),))) == ((0.25, 0.25),)


@pytest.mark.parametrize("table", [ADVANTAGES, LOSSES, KL_PENALTIES, AGGREGATIONS, CORRECTIONS])
def test_every_table_of_algorithms_refuses_a_function_of_something_else(table: object) -> None:
    with pytest.raises(ConfigError, match="'logits' is not an input"):
        table.add("mine", lambda logits: logits)  # type: ignore[attr-defined]
    assert "mine" not in table  # type: ignore[operator]
