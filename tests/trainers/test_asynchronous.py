"""Learning while later steps are played: a bound of 0 is the synchronous loop, no token is too old, nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.chat_templates import renderer_for
from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.engines.local.engine import LocalEngine
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.event_loop import run_async
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.trainers.batch.batch import build_batch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner, StepStats
from agentgym.trainers.loop.step_credit import credit_step
from agentgym.trainers.parts.engine import local_settings, open_engine, weights_for
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.tasks import AheadTasks, EnvTasks
from agentgym.trajectory import Group, Trajectory

Train = Callable[..., Any]


@pytest.fixture
def ahead(small_run: TrainConfig) -> TrainConfig:
    """The small run, four steps of it, learning while two further steps are played."""
    plain = replace(small_run, optimizer=OptimizerConfig(learning_rate=1e-4))
    return replace(plain, steps=4, max_staleness=2, checkpoint=CheckpointConfig(every=2))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def groups_of(folder: Path) -> list[tuple[int, str]]:
    """The step that learned from each group, and the group's name."""
    groups = {(record.step, record.trajectory.group) for record in read_episodes(folder) if record.phase == "train"}
    return sorted(groups)


@pytest.mark.slow
def test_a_run_ahead_learns_from_whole_groups_within_the_staleness_bound(
    ahead: TrainConfig, train: Train, tmp_path: Path
) -> None:
    _, watcher = train(replace(ahead, eval=HeldOutConfig(episodes=2)), tmp_path / "run")
    records = [record for record in read_episodes(tmp_path / "run") if record.phase == "train"]
    assert len({(record.trajectory.group, record.trajectory.member) for record in records}) == len(records) == 48
    ages = []
    for record in records:
        for row in record.trajectory.rows:
            ages += [record.step - 1 - int(version) for version in row.policy_versions[row.sampled_mask]]
    assert 0 <= min(ages) and 0 < max(ages) <= 2
    lines = lines_of(tmp_path / "run")
    assert max(line["staleness_max"] for line in lines) == max(ages)
    assert all(0 <= line["staleness_mean"] <= line["staleness_max"] for line in lines)
    assert all(0 <= line["groups_ahead"] <= 9 and line["learner_wait_s"] >= 0 for line in lines)
    assert all(step.update is None or step.update.mismatch_max < 1e-3 for step in watcher.steps)
    assert verify_run(tmp_path / "run").ok


def learned(learner: Learner, groups: Sequence[Group], config: TrainConfig, version: int) -> StepStats | None:
    """What a step on the groups makes of the learner's model; None where they carry no signal."""
    credits = credit_step(groups, config, learner, {})
    batch = build_batch(groups, credits, aggregation=config.aggregation or "", drop_zero=True)
    return learner.update(batch, version=version) if batch.num_rows else None


async def by_hand(config: TrainConfig) -> list[StepStats | None]:
    """Play, credit, learn, publish, one after the other, and nothing else."""
    config = resolve_config(config)
    model, renderer = load_decoder(embedded_folder()), renderer_for(embedded_folder())
    engine = LocalEngine(model, local_settings(config, model))
    sampler = Sampler(
        RolloutLoop(engine, renderer, config.limits, config.sampling.for_episodes()), config=config.sampler
    )
    learner = Learner(model, config.learner, config.optimizer, total_steps=config.steps)
    tasks, updates = EnvTasks(config.env, config.seed, {"level": 1}), []
    for step in range(1, config.steps + 1):
        exercises = tasks.train_tasks(step, range(config.tasks))
        groups = await sampler.sample(exercises, config.group_size, step=step, run_seed=config.seed)
        await engine.pause()
        updates.append(learned(learner, groups, config, step - 1))
        await engine.update_weights({}, step)
        await engine.resume()
    learner.close()
    sampler.close()
    await engine.close()
    return updates


@pytest.mark.slow
def test_a_bound_of_0_is_the_synchronous_loop_to_the_bit(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    config = replace(small_run)
    _, watcher = train(replace(config, max_staleness=0), tmp_path / "run")
    expected = run_async(by_hand(config))
    assert [step.update for step in watcher.steps] == expected and None not in expected
    assert "staleness_max" not in lines_of(tmp_path / "run")[0]


@pytest.mark.slow
def test_what_is_sampled_before_the_first_update_is_what_the_synchronous_run_samples(
    ahead: TrainConfig, train: Train, tmp_path: Path
) -> None:
    """Seeds do not depend on the schedule: up to the update, the episodes of the first step have the same ids."""
    played = []
    for name, steps, bound in (("in turn", 1, 0), ("ahead", 2, 1)):
        train(replace(ahead, steps=steps, max_staleness=bound), tmp_path / name)
        records = [record.trajectory for record in read_episodes(tmp_path / name)]
        played.append(
            {
                (trajectory.group, trajectory.member): trajectory.rows[0]
                for trajectory in records
                if trajectory.group.startswith("1/")
            }
        )
    assert len(played[0]) == 12 and played[0].keys() == played[1].keys(), "both steps take what began before the update"
    for key, row in played[1].items():
        renewed = (row.policy_versions > 0).nonzero()[0]
        num_alike = int(renewed[0]) if len(renewed) else len(row)
        assert row.ids[:num_alike].tolist() == played[0][key].ids[:num_alike].tolist()
        assert row.sampled_mask[:num_alike].any()


@pytest.mark.slow
def test_learning_beside_sampling_equals_learning_from_the_recorded_groups(
    ahead: TrainConfig, train: Train, tmp_path: Path
) -> None:
    """Loss by loss and weight by weight: neither the thread nor the episodes that go on meanwhile change a bit."""
    result, _ = train(ahead, tmp_path / "run")
    ahead = resolve_config(ahead)
    model = load_decoder(embedded_folder())
    learner = Learner(model, ahead.learner, ahead.optimizer, total_steps=ahead.steps)
    losses = []
    for step in range(1, ahead.steps + 1):
        members: dict[str, list[Trajectory]] = {}
        for record in read_episodes(tmp_path / "run"):
            if record.step == step:
                members.setdefault(record.trajectory.group, []).append(record.trajectory)
        groups = [Group(name, own[0].task, tuple(own)) for name, own in members.items()]
        stats = learned(learner, groups, ahead, step - 1)
        losses.append(stats.loss if stats else 0.0)
    learner.close()
    assert losses == [line["loss"] for line in lines_of(tmp_path / "run")] and any(losses)
    trained = load_decoder(result.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))


@pytest.mark.slow
def test_a_resumed_run_loses_no_task_and_learns_from_none_twice(
    ahead: TrainConfig, train: Train, tmp_path: Path
) -> None:
    train(replace(ahead, steps=2), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").read_text())["tasks"]
    waiting = [key for _, key, _ in stored["ahead"]]
    done = {key for _, key in groups_of(tmp_path / "run")}
    assert waiting and not done & set(waiting)
    train(ahead, tmp_path / "run", resume=True)
    groups = groups_of(tmp_path / "run")
    names = [key for _, key in groups]
    assert len(set(names)) == len(names) == 12
    later = json.loads((tmp_path / "run" / "checkpoints" / "step-000004" / "state.json").read_text())["tasks"]
    keys = set(names) | {key for _, key, _ in later["ahead"]}
    step, place = later["next"]
    assert keys == {f"{at // 3 + 1}/{at % 3}" for at in range(3 * (step - 1) + place)}, "a task was lost"
    assert sum(line["resumed_groups"] for line in lines_of(tmp_path / "run")) > 0
    seeds = {record.trajectory.group: record.trajectory.task.seed for record in read_episodes(tmp_path / "run")}
    again = {key: task["seed"] for _, key, task in stored["ahead"]}
    assert all(seeds[key] == seed for key, seed in again.items() if key in seeds)


def test_what_was_ordered_and_not_learned_from_is_ordered_again_under_the_same_name() -> None:
    tasks = AheadTasks(EnvTasks("TextGame-v0", 0), 2)
    requests = tasks.requests()
    first = [next(requests) for _ in range(5)]
    assert [request.key for request in first] == ["1/0", "1/1", "2/0", "2/1", "3/0"]
    tasks.finish(1, [Group("1/1", first[1].task, ()), Group("2/0", first[2].task, ())])
    again = AheadTasks(EnvTasks("TextGame-v0", 0), 2)
    again.load(json.loads(json.dumps(tasks.state(), default=dict)))
    requests = again.requests()
    resumed = [next(requests) for _ in range(4)]
    assert [request.key for request in resumed] == ["1/0", "2/1", "3/0", "3/1"]
    assert resumed[:3] == [first[0], first[3], first[4]]
    again.finish(2, [Group("2/1", first[3].task, ()), Group("3/1", resumed[3].task, ())])
    assert again.metrics()["resumed_groups"] == 1
    assert again.train_tasks(1, range(2)) == [first[0].task, first[1].task]


def test_the_engine_copies_the_weights_only_if_it_samples_during_training(
    small_run: TrainConfig, tmp_path: Path
) -> None:
    model = load_decoder(embedded_folder())

    async def copied(bound: int) -> tuple[bool, int, bool]:
        config = replace(small_run, max_staleness=bound)
        engine = await open_engine(config, model, embedded_folder(), version=0, log_folder=tmp_path)
        try:
            assert isinstance(engine, LocalEngine)
            with torch.no_grad():
                model.embed.add_(1.0)
            before = torch.equal(engine.model.embed, model.embed)
            sync = await engine.update_weights(weights_for(engine, model), 1)
            return before, sync.num_tensors, torch.equal(engine.model.embed, model.embed)
        finally:
            await engine.close()

    assert run_async(copied(0)) == (True, 0, True)
    assert run_async(copied(1)) == (False, len(dict(published_views(model))), True)


def test_a_baseline_that_is_played_with_the_weights_of_the_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave serve, agent and max_staleness out"):
        resolve_config(TrainConfig(env="X", algo="remax", max_staleness=1))
    with pytest.raises(ConfigError, match="max_staleness must be at least 0, got -1"):
        TrainConfig(env="X", max_staleness=-1)


def test_over_dispatch_is_refused_with_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "TextGame-v0", "--over-dispatch", "8"]) != 0
    assert "unknown option '--over-dispatch': max_staleness has later steps played" in capsys.readouterr().err
