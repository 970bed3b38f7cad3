"""The training loop: equal seeds give equal bytes, failures stay out, a run resumes bitwise and names what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agentgym.envs.games.text_game.env import TextGame
from agentgym.errors import ConfigError, RunFolderError, TrainingHalted, UnknownName
from agentgym.evaluation import verify_run
from agentgym.model.model_folder import load_decoder
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.algorithms.aggregation import AGGREGATIONS
from agentgym.trainers.algorithms.losses import ppo_clip
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import LearnerConfig
from agentgym.trainers.lessons.recorded_episodes import choose_episodes, read_played
from agentgym.trainers.loop.observer import Unobserved
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.record import RecordConfig
from agentgym.trajectory import Status

HERE = "tests.trainers.loop.test_trainer"
Train = Callable[..., Any]


@pytest.fixture
def small_run(small_run: TrainConfig) -> TrainConfig:
    """A smaller run with evaluations, and with small steps."""
    return replace(
        small_run, tasks=2, group_size=3, eval=HeldOutConfig(episodes=4), optimizer=OptimizerConfig(learning_rate=1e-4)
    )


class ThreadedGame(TextGame):
    """The text game, called on threads of its own."""

    runs_inline = False


class Fragile(TextGame):
    """Raises in about 15% of its episodes, depending on the seed alone."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.breaks = seed is not None and seed % 20 < 3
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Any:
        if self.breaks and self.turns >= 2:
            raise RuntimeError("the wire is cut")
        return super().step(action)


def losses(steps: Sequence[StepMetrics]) -> list[float | None]:
    return [step.update.loss if step.update else None for step in steps]


@pytest.mark.long
def test_a_run_leaves_metrics_episodes_and_a_checkpoint_that_transformers_loads(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    result, watcher = train(small_run, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    phases = [name for name in watcher.phases if name != "compile"]
    assert phases == ["model embedded", "eval_before", "train", "eval_after"]
    records = list(read_episodes(tmp_path / "run" / "episodes.jsonl"))
    assert [record.phase for record in records] == ["eval_before"] * 4 + ["train"] * 12 + ["eval_after"] * 4
    assert result.checkpoint is not None and result.after is not None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    ours = load_decoder(result.checkpoint)
    assert torch.equal(theirs.model.embed_tokens.weight, ours.embed)
    assert AutoTokenizer.from_pretrained(result.checkpoint).encode("<|im_end|>")


@pytest.mark.long
def test_equal_seeds_give_equal_bytes_with_any_number_of_environment_threads(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    runs = []
    for name, threads in (("a", 1), ("b", 8), ("c", None)):
        config = replace(small_run, env=f"{HERE}:ThreadedGame", sampler=SamplerConfig(env_threads=threads))
        _, watcher = train(config, tmp_path / name)
        runs.append(((tmp_path / name / "episodes.jsonl.zst").read_bytes(), losses(watcher.steps)))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1].count(None) < 2


@pytest.mark.slow
def test_another_seed_gives_other_episodes(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    files = []
    for seed in (0, 1):
        train(replace(small_run, seed=seed, steps=1, eval=HeldOutConfig(episodes=0)), tmp_path / str(seed))
        files.append((tmp_path / str(seed) / "episodes.jsonl.zst").read_bytes())
    assert files[0] != files[1]


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_never_stopped(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    whole, watcher = train(replace(small_run, steps=4, checkpoint=CheckpointConfig(every=2)), tmp_path / "whole")
    train(replace(small_run, steps=2, checkpoint=CheckpointConfig(every=2)), tmp_path / "parts")
    resumed, second = train(
        replace(small_run, steps=4, checkpoint=CheckpointConfig(every=2)), tmp_path / "parts", resume=True
    )
    assert losses(watcher.steps)[2:] == losses(second.steps)
    assert whole.checkpoint is not None and resumed.checkpoint is not None
    episodes = [(tmp_path / name / "episodes.jsonl.zst").read_bytes() for name in ("whole", "parts")]
    assert episodes[0] == episodes[1]
    assert resumed.before == whole.before and resumed.after == whole.after
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    elapsed = [json.loads(line)["elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)
    first, again = load_decoder(whole.checkpoint), load_decoder(resumed.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_when_resumed(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    train(small_run, tmp_path / "run")
    whole = (tmp_path / "run" / "episodes.jsonl.zst").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(small_run, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "episodes.jsonl.zst").read_bytes() == whole


@pytest.mark.slow
def test_a_resumed_run_keeps_the_reference_that_training_began_with(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(
        small_run, learner=LearnerConfig(kl=KLConfig(coefficient=0.1)), optimizer=OptimizerConfig(learning_rate=1e-3)
    )
    _, watcher = train(replace(config, steps=3, checkpoint=CheckpointConfig(every=2)), tmp_path / "whole")
    train(replace(config, steps=2, checkpoint=CheckpointConfig(every=2)), tmp_path / "parts")
    _, resumed = train(replace(config, steps=3, checkpoint=CheckpointConfig(every=2)), tmp_path / "parts", resume=True)
    assert losses(watcher.steps)[2:] == losses(resumed.steps)
    update = resumed.steps[0].update
    assert update is not None and update.kl > 1e-4


@pytest.mark.slow
def test_failed_episodes_change_no_advantage_of_the_others(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(small_run, steps=1, tasks=12, eval=HeldOutConfig(episodes=0))
    train(replace(config, env=f"{HERE}:Fragile"), tmp_path / "fragile")
    train(replace(config, env=f"{HERE}:ThreadedGame"), tmp_path / "sound")
    broken = list(read_episodes(tmp_path / "fragile" / "episodes.jsonl"))
    sound = {
        (record.trajectory.group, record.trajectory.member): record
        for record in read_episodes(tmp_path / "sound" / "episodes.jsonl")
    }
    failed = [record for record in broken if record.trajectory.status is Status.ENV_ERROR]
    assert failed and all(record.trajectory.reward is None and record.advantages is None for record in failed)
    groups_hit = {record.trajectory.group for record in failed}
    untouched = [record for record in broken if record.trajectory.group not in groups_hit]
    assert untouched
    for record in untouched:
        twin = sound[record.trajectory.group, record.trajectory.member]
        assert record.advantages == twin.advantages
        assert record.trajectory.rows[0].ids.tolist() == twin.trajectory.rows[0].ids.tolist()


@pytest.mark.long
def test_a_learning_rate_that_destroys_the_model_halts_and_keeps_what_was_written(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(small_run, steps=30, optimizer=OptimizerConfig(learning_rate=1e39))
    with pytest.raises(TrainingHalted, match="not finite"):
        train(config, tmp_path / "run")
    assert [record.phase for record in read_episodes(tmp_path / "run")] == ["eval_before"] * 4


def test_mistakes_end_before_anything_is_written(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="TextGame-v0"):
        train(replace(small_run, env="TextGme-v0"), tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"config\.json|tokenizer"):
        train(replace(small_run, model=str(tmp_path / "absent")), tmp_path / "run")
    with pytest.raises(ConfigError, match="group_size 1"):
        train(replace(small_run, group_size=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_folder_with_a_run_is_not_overwritten_or_resumed_with_other_settings(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(small_run, steps=1, eval=HeldOutConfig(episodes=0))
    train(config, tmp_path / "run")
    with pytest.raises(RunFolderError, match="--resume"):
        train(config, tmp_path / "run")
    with pytest.raises(
        RunFolderError, match=r"other settings \(seed: 0 there, 9 here; optimizer.max_grad_norm: 1.0 there, 0.5"
    ):
        new_config = replace(config, seed=9, optimizer=replace(config.optimizer, max_grad_norm=0.5))
        train(new_config, tmp_path / "run", resume=True)
    (tmp_path / "run" / "config.yaml").write_text("kind: eval\nenv: TextGame-v0\n")
    with pytest.raises(RunFolderError, match="no training run"):
        train(config, tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_run_is_resumed_with_another_stall_s(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    config = replace(small_run, steps=1, eval=HeldOutConfig(episodes=0))
    train(config, tmp_path / "run")
    new_config = replace(config, steps=2, limits=replace(config.limits, stall_s=999.0))
    result, _ = train(new_config, tmp_path / "run", resume=True)
    assert result.steps == 2


@pytest.mark.slow
def test_a_run_of_a_version_with_fewer_settings_goes_on_with_their_defaults(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config, place = replace(small_run, steps=1, eval=HeldOutConfig(episodes=0)), tmp_path / "run" / "config.yaml"
    train(config, tmp_path / "run")
    stored = yaml.safe_load(place.read_text())
    del stored["max_staleness"], stored["learner"]["lora"]
    place.write_text(yaml.safe_dump(stored))
    with pytest.raises(RunFolderError, match="max_staleness: 0 there, 1 here"):
        train(replace(config, max_staleness=1), tmp_path / "run", resume=True)
    result, _ = train(replace(config, steps=2), tmp_path / "run", resume=True)
    assert result.steps == 2


def test_a_setting_with_a_typing_error_names_the_nearest_right_one() -> None:
    assert (
        config_from_mapping(TrainConfig, {"env": "X", "optimizer": {"layer_decay": 0.8}}).optimizer.layer_decay == 0.8
    )
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rte.*learning_rate"):
        config_from_mapping(TrainConfig, {"env": "X", "optimizer": {"learning_rte": 0.1}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "missing env: name an environment"),
        ({"env": "X", "steps": "many"}, "setting 'steps' is a whole number, got 'many'"),
        ({"env": "X", "steps": True}, "setting 'steps' is a whole number, got True"),
        ({"env": "X", "learner": {"critic": {"trunk": "ours"}}}, "setting 'learner.critic.trunk' is 'none' or 'own'"),
        ({"env": "X", "max_minutes": "soon"}, r"setting 'max_minutes' is a number or None \(null\), got 'soon'"),
        ({"env": "X", "optimizer": {"layer_decay": None}}, "setting 'optimizer.layer_decay' is a number, got None"),
        ({"env": "X", "collapse": {"stop_on": "nan"}}, "setting 'collapse.stop_on' is a list, got 'nan'"),
        ({"env": "X", "collapse": {"stop_on": ["nam"]}}, "setting 'collapse.stop_on' .* got 'nam': did you mean 'nan'"),
        ({"env": "X", "allow_single": "no"}, "setting 'allow_single' is True or False, got 'no'"),
        ({"env": "X", "env_kwargs": [1]}, r"setting 'env_kwargs' is a mapping of names to values, got \[1\]"),
    ],
)
def test_a_setting_of_another_type_is_named_with_what_it_takes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_mapping(TrainConfig, settings)


def test_only_an_aggregation_with_a_constant_is_given_one() -> None:
    mode = "seq-mean-token-sum-norm"
    assert config_from_mapping(TrainConfig, {"env": "X", "aggregation": mode, "norm_tokens": 64}).norm_tokens == 64
    with pytest.raises(ConfigError, match="leave norm_tokens out, or add --aggregation seq-mean-token-sum-norm"):
        resolve_config(config_from_mapping(TrainConfig, {"env": "X", "norm_tokens": 64}))
    with pytest.raises(ConfigError, match="norm_tokens must be at least 1"):
        config_from_mapping(TrainConfig, {"env": "X", "aggregation": mode, "norm_tokens": 0})


def test_the_configuration_knows_every_aggregation() -> None:
    for mode in AGGREGATIONS:
        norm = 64 if mode.endswith("norm") else None
        assert config_from_mapping(TrainConfig, {"env": "X", "aggregation": mode, "norm_tokens": norm})


def test_the_settings_of_a_loss_survive_the_file_that_a_run_keeps() -> None:
    learner = LearnerConfig(loss="gspo", loss_settings={"clip_high": 0.3})
    config = TrainConfig(env="X", learner=learner)
    stored = yaml.safe_load(yaml.safe_dump(asdict(config)))
    assert config_from_mapping(TrainConfig, stored) == config


def test_a_number_that_yaml_reads_as_text_is_a_number() -> None:
    settings = yaml.safe_load("{env: X, optimizer: {learning_rate: 1e-4}, max_minutes: 5, env_kwargs: {level: 1}}")
    config = config_from_mapping(TrainConfig, settings)
    assert (config.optimizer.learning_rate, config.max_minutes, config.env_kwargs) == (1e-4, 5.0, {"level": 1})


class Interrupts(Unobserved):
    """Has the loss send Ctrl-C twice once the first step is done."""

    due = False

    def on_step(self, metrics: StepMetrics) -> None:
        Interrupts.due = True


def interrupting_loss(logp: Any, old_logp: Any, advantages: Any, mask: Any, *, sequences: Any = None) -> Any:
    """The bundled loss, interrupted in the middle of the second step."""
    if Interrupts.due:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
    return ppo_clip(logp, old_logp, advantages, mask)


@pytest.mark.long
def test_two_interrupts_in_a_half_made_step_write_no_checkpoint_of_it(small_run: TrainConfig, tmp_path: Path) -> None:
    learner = LearnerConfig(loss=f"{HERE}:interrupting_loss")
    config = replace(
        small_run,
        eval=HeldOutConfig(episodes=0),
        learner=learner,
        max_staleness=1,
    )
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, tmp_path / "run", Interrupts()).fit()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_a_run_that_leaves_out_tokens_is_checked_as_far_as_it_goes_and_resumes(
    small_run: TrainConfig, tmp_path: Path
) -> None:
    config = replace(small_run, steps=2, record=RecordConfig(compress=False, tokens=False))
    Trainer(config, tmp_path / "whole").fit()
    Trainer(replace(config, steps=1), tmp_path / "parts").fit()
    Trainer(config, tmp_path / "parts", resume=True).fit()
    whole, parts = ((tmp_path / name / "episodes.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert b'"ids":' not in whole and b'"role":"system"' in whole
    report = verify_run(tmp_path / "whole")
    assert report.ok and report.num_without_ids == report.num_episodes
    assert not choose_episodes(read_played([tmp_path / "whole"]), min_reward=0.0).episodes
