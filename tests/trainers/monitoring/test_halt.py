"""Real runs that collapse: each is named within three steps, or stops with what is needed to look at it and go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.cli.main import main
from agentgym.envs.games.text_game.env import TextGame
from agentgym.errors import RunFolderError, TrainingHalted
from agentgym.model.model_folder import load_decoder
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.trainers.algorithms.losses import LOSSES, PolicyLoss, traits
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.finite import NotFinite
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.monitoring.halt import load_batch
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.settings.collapse import CollapseConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.sampling import TrainSamplingConfig
from agentgym.viewer.run_data import read_run

HERE = "tests.trainers.monitoring.test_halt"
Train = Callable[..., Any]


class Worthless(TextGame):
    """Whatever is done earns `paid`."""

    paid = 0.0

    def step(self, action: str) -> Any:
        observation, _, _, truncated, info = super().step(action)
        return observation, self.paid, True, truncated, {**info, "metrics": {"success": self.paid}}


class Priceless(Worthless):
    paid = 1.0


class Overpaid(Worthless):
    """Pays more than float32 holds."""

    paid = 1e39


class Fragile(TextGame):
    """Breaks at its fourth turn, seven of eight of them."""

    num_made = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        Fragile.num_made += 1
        self.number = Fragile.num_made

    def step(self, action: str) -> Any:
        if self.turns == 4 and self.number % 8:  # the check of the engine plays three turns
            raise RuntimeError("a wheel came off")
        return super().step(action)


class Silent(TextGame):
    """Pays for each reply without a call."""

    def step(self, action: str) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(not getattr(action, "tool_calls", ())), terminated, truncated, info


@pytest.fixture
def quick(small_run: TrainConfig) -> TrainConfig:
    """Steps of short episodes on the engine as it is, in a fraction of a second."""
    return replace(
        small_run,
        limits=Limits(max_turns=4, turn_tokens=32),
        steps=4,
        tasks=2,
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def first(steps: list[StepMetrics]) -> dict[str, int]:
    """By name, the step that showed a symptom first."""
    return {symptom.name: symptom.step for step in reversed(steps) for symptom in step.symptoms}


@pytest.fixture
def poison() -> Iterator[dict[str, int]]:
    """Meanwhile the policy loss `gpg` is that of REINFORCE, and 0 / 0 in one update: after `at` others."""
    counts, original = {"at": 2, "seen": 0}, LOSSES["gpg"]

    @traits()
    def poisoned(logp: Any, old_logp: Any, advantages: Any, mask: Any, *, sequences: Any = None) -> PolicyLoss:
        result = LOSSES["reinforce"](logp, old_logp, advantages, mask, sequences=sequences)
        if len(logp) <= 4:  # tried on a few tokens, before anything is played
            return result
        counts["seen"] += 1
        zero = (logp * 0).sum()
        return replace(result, loss=result.loss + zero / zero) if counts["seen"] == counts["at"] + 1 else result

    LOSSES.add("gpg", poisoned, replace=True)
    yield counts
    LOSSES.add("gpg", original, replace=True)


@pytest.mark.long
@pytest.mark.parametrize(("env", "name"), [("Worthless", "dead_groups"), ("Priceless", "solved")])
def test_an_environment_that_always_pays_the_same_is_named(
    quick: TrainConfig, train: Train, tmp_path: Path, env: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, watcher = train(replace(quick, env=f"{HERE}:{env}"), tmp_path / "run")
    assert first(watcher.steps)[name] <= 3
    rest = {"dead_groups", "solved"} - {name}
    assert not rest & first(watcher.steps).keys()
    messages = [record.getMessage() for record in caplog.records if f" {name}: " in record.getMessage()]
    assert len(messages) == 1, "a symptom is named once"
    written = lines(tmp_path / "run")
    assert [line["dead_group_share"] for line in written] == [1.0] * 4
    assert name in written[-1]["signs"] and name not in written[0]["signs"]
    assert sum(text.startswith(name) for line in written for text in line["warnings"]) == 1


@pytest.mark.long
@pytest.mark.parametrize("rate", [10.0, 1e3])
def test_a_learning_rate_that_destroys_the_policy_is_named_by_what_it_does(
    quick: TrainConfig, train: Train, tmp_path: Path, rate: float
) -> None:
    config = replace(quick, optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=1))
    _, watcher = train(config, tmp_path / "run")
    destroyed = next(step.step for step in watcher.steps if step.update)
    first_steps = first(watcher.steps)
    symptoms = {"format_lost", "tools_lost", "repetition", "entropy_lost", "entropy_exploded"} & first_steps.keys()
    assert "dead_groups" in first_steps and symptoms
    assert min(first_steps[name] for name in symptoms) <= destroyed + 3


@pytest.mark.slow
def test_an_entropy_that_is_driven_to_nothing_is_named(quick: TrainConfig, train: Train, tmp_path: Path) -> None:
    learner = LearnerConfig(entropy_coefficient=-3.0)
    config = replace(quick, steps=6, learner=learner, optimizer=OptimizerConfig(learning_rate=0.03, warmup_steps=1))
    _, watcher = train(config, tmp_path / "run")
    sampled = [step.rollout.sampled_entropy or 0.0 for step in watcher.steps]
    gone = next(step for step, entropy in enumerate(sampled, 1) if entropy < 1e-3)
    assert sampled[0] > 0.05
    assert gone < first(watcher.steps)["entropy_lost"] <= gone + 2


@pytest.mark.slow
def test_a_reward_that_punishes_calls_is_named_once_calls_stop(
    quick: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(
        quick,
        env=f"{HERE}:Silent",
        steps=6,
        tasks=4,
        group_size=8,
        limits=Limits(max_turns=2, turn_tokens=24),
        sampling=TrainSamplingConfig(temperature=2.5),
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )
    _, watcher = train(config, tmp_path / "run")
    calls = [step.rollout.tool_calls_per_turn for step in watcher.steps]
    vanished = next(step for step, value in enumerate(calls, 1) if value < 0.1 * calls[0])
    assert calls[0] > 0.2
    assert first(watcher.steps)["tools_lost"] <= vanished + 2


@pytest.mark.long
def test_a_nan_loss_stops_the_run_with_the_batch_saved_and_the_weights_unchanged(
    quick: TrainConfig, train: Train, tmp_path: Path, poison: dict[str, int]
) -> None:
    run = tmp_path / "run"
    config = replace(quick, learner=LearnerConfig(loss="gpg", threads=1))
    with pytest.raises(NotFinite, match=r"halted.step-000003") as raised:
        train(config, run)
    assert isinstance(raised.value, TrainingHalted)
    assert [line["step"] for line in lines(run)] == [1, 2]
    folder = run / "halted" / "step-000003"
    episodes = list(read_episodes(folder))
    assert [record.step for record in episodes] == [3] * 8 and all(record.advantages for record in episodes)
    assert {record.trajectory.group for record in episodes} == {"3/0", "3/1"}

    checkpoint = run / "checkpoints" / "step-000002"
    model = load_decoder(checkpoint)
    batch = load_batch(folder)
    assert batch.num_trained_tokens <= sum(record.trajectory.num_trained_tokens for record in episodes)
    learner = Learner(model, config.learner, config.optimizer, total_steps=4)
    gap_M = learner.logprobs(batch) - batch.old_logp_N[batch.mask_N]
    assert float(gap_M.abs().max()) < 1e-3, "the checkpoint holds the weights that the episodes were sampled with"
    poison["seen"] = poison["at"]
    with pytest.raises(NotFinite):
        learner.update(batch)
    learner.close()


@pytest.mark.long
def test_a_halted_step_is_viewed_and_verified_like_a_run(
    quick: TrainConfig, train: Train, tmp_path: Path, poison: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    poison["at"] = 0
    with pytest.raises(NotFinite):
        train(replace(quick, learner=LearnerConfig(loss="gpg")), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists(), "there was no whole step"
    folder = tmp_path / "run" / "halted" / "step-000001"
    assert main(["verify", str(folder)]) == 0
    assert "sound" in capsys.readouterr().out
    assert main(["view", str(folder), "--share", str(folder / "report.html")]) == 0
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_a_run_that_halted_is_resumed_from_the_last_whole_step_as_if_it_had_gone_on(
    quick: TrainConfig, train: Train, tmp_path: Path, poison: dict[str, int]
) -> None:
    config = replace(quick, learner=LearnerConfig(loss="gpg"))
    with pytest.raises(NotFinite):
        train(config, tmp_path / "run")
    train(config, tmp_path / "run", resume=True)  # the cause is gone
    poison.update(seen=0, at=99)
    train(config, tmp_path / "whole")
    files = [(tmp_path / name / "episodes.jsonl.zst").read_bytes() for name in ("run", "whole")]
    assert files[0] == files[1]
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 5))


@pytest.mark.long
def test_without_nan_among_the_signs_that_stop_the_step_is_left_out(
    quick: TrainConfig, train: Train, tmp_path: Path, poison: dict[str, int]
) -> None:
    poison["at"] = 0
    config = replace(quick, steps=3, learner=LearnerConfig(loss="gpg"), collapse=CollapseConfig(stop_on=()))
    _, watcher = train(config, tmp_path / "run")
    assert [step.step for step in watcher.steps] == [1, 2, 3]
    left_out, *after = watcher.steps
    assert left_out.update is None and [symptom.name for symptom in left_out.symptoms] == ["nan"]
    assert any(step.update for step in after)
    assert all("nan" not in [symptom.name for symptom in step.symptoms] for step in after)
    assert (tmp_path / "run" / "halted" / "step-000001" / "batch.pt").is_file()


@pytest.mark.long
def test_a_return_beyond_float32_stops_the_run_with_its_episodes_or_skips_the_step(
    quick: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(quick, env=f"{HERE}:Overpaid", steps=2, algo="turn_returns")
    with pytest.raises(NotFinite, match=r"'turn_returns' gives advantages of 1e\+39 .*halted.step-000001"):
        train(config, tmp_path / "run")
    records = list(read_episodes(tmp_path / "run" / "halted" / "step-000001"))
    assert len(records) == 8 and {record.trajectory.turns[-1].reward for record in records} == {1e39}
    assert all(record.advantages is None for record in records)
    _, watcher = train(replace(config, collapse=CollapseConfig(stop_on=())), tmp_path / "left_out")
    assert [step.update for step in watcher.steps] == [None, None]
    assert [symptom.name for symptom in watcher.steps[0].symptoms] == ["nan"]


@pytest.mark.long
@pytest.mark.parametrize(("rate", "epochs"), [(1e39, 1), (1e18, 1), (1e18, 2)])
def test_a_step_that_destroys_the_weights_stops_before_they_are_played_with(
    quick: TrainConfig, train: Train, tmp_path: Path, rate: float, epochs: int
) -> None:
    quick = replace(quick, learner=LearnerConfig(epochs=epochs))
    config = replace(
        quick, collapse=CollapseConfig(stop_on=()), optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=1)
    )
    with pytest.raises(NotFinite, match="made weights whose logprobs are not finite"):
        train(config, tmp_path / "run")
    assert load_batch(tmp_path / "run" / "halted" / "step-000001").num_rows
    assert not (tmp_path / "run" / "checkpoints").exists(), "lost weights are no checkpoint"


@pytest.mark.long
def test_a_sign_that_stops_leaves_a_checkpoint_of_the_last_whole_step(
    quick: TrainConfig, train: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = replace(quick, env=f"{HERE}:Worthless", collapse=CollapseConfig(stop_on=("nan", "dead_groups")))
    with pytest.raises(TrainingHalted, match=r"dead_groups: no episode succeeds.*stop_on"):
        train(config, run)
    (last,) = lines(run)[-1:]
    assert last["step"] == 2 and last["signs"] == ["dead_groups"]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000002"]
    _, watcher = train(replace(config, collapse=CollapseConfig()), run, resume=True)
    assert [step.step for step in watcher.steps] == [3, 4]
    assert first(watcher.steps)["dead_groups"] == 2, "a resumed run knows what was named before"


@pytest.mark.long
def test_a_solved_run_ends_as_after_its_last_step(quick: TrainConfig, train: Train, tmp_path: Path) -> None:
    config = replace(
        quick,
        env=f"{HERE}:Priceless",
        eval=HeldOutConfig(episodes=2),
        collapse=CollapseConfig(stop_on=("nan", "solved")),
    )
    result, _ = train(config, tmp_path / "run")
    assert result.steps == 2 and result.after is not None and result.after.success == 1.0
    assert result.checkpoint is not None and result.end == "solved"


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_what_was_played_is_kept_when_too_many_episodes_fail(
    quick: TrainConfig, train: Train, tmp_path: Path, max_staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TrainingHalted, match="a wheel came off"):
        strict = SamplerConfig(max_failure_rate=0.05)
        train(replace(quick, env=f"{HERE}:Fragile", max_staleness=max_staleness, sampler=strict), tmp_path / "run")
    (folder,) = (tmp_path / "run" / "halted").iterdir()
    step = int(folder.name.removeprefix("step-"))
    assert f"what was played of step {step} is in {folder}" in caplog.text
    trajectories = [record.trajectory for record in read_episodes(folder)]
    assert any(trajectory.error and "a wheel came off" in trajectory.error for trajectory in trajectories)
    assert [record.step for record in read_run(folder).episodes] == [step] * len(trajectories)


def test_a_folder_without_a_halted_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no halted step"):
        load_batch(tmp_path)


@pytest.mark.long
def test_the_estimate_of_the_entropy_is_that_of_the_sampled_tokens(
    quick: TrainConfig, train: Train, tmp_path: Path
) -> None:
    train(replace(quick, steps=1), tmp_path / "run")
    (line,) = lines(tmp_path / "run")
    spans = [
        span
        for record in read_episodes(tmp_path / "run")
        for row in record.trajectory.rows
        for span in row.spans
        if span.logprobs
    ]
    logprobs = torch.tensor([value for span in spans for value in span.logprobs or ()], dtype=torch.float64)
    assert line["sampled_entropy"] == pytest.approx(-float(logprobs.mean()), rel=1e-5)
    assert line["tool_calls_per_turn"] == pytest.approx(line["tool_calls"] / len(spans))
    assert line["kl"] is None, "without a reference model there is no KL to it"
