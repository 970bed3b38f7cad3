"""Whole runs: what is left out is recorded and counted, everything resumes bitwise, and a dead step is no end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.envs.games.text_game.env import TextGame
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.model_folder import load_decoder
from agentgym.rollout.record.episodes_file import EpisodeRecord, read_episodes
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.tasks import CurriculumConfig, PracticeConfig, ReplayConfig

HERE = "tests.trainers.tasks.test_practice_runs"
Train = Callable[..., Any]


@pytest.fixture
def small_run(small_run: TrainConfig) -> TrainConfig:
    """The small run with short episodes."""
    return replace(small_run, limits=replace(small_run.limits, max_turns=8))


class Drawn(TextGame):
    """The text game as its seeds alone draw it; some groups of the first steps are dead."""

    own_split = True


class Hopeless(TextGame):
    """The text game, where nothing is rewarded and nothing succeeds."""

    def step(self, action: str) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 0.0, terminated, truncated, {**info, "metrics": {"success": 0.0}}


class Fragile(TextGame):
    """Raises in about a third of its episodes, all members of a group alike."""

    own_split = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if seed is not None and seed % 3 == 0:
            raise RuntimeError("the wire is cut")
        return super().reset(seed=seed, options=options)


def groups_of(folder: Path, step: int) -> dict[str, list[EpisodeRecord]]:
    groups: dict[str, list[EpisodeRecord]] = {}
    for record in read_episodes(folder):
        if record.step == step and record.phase == "train":
            groups.setdefault(record.trajectory.group, []).append(record)
    return groups


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def is_dead(members: list[EpisodeRecord]) -> bool:
    return len({record.trajectory.reward for record in members} - {None}) < 2


@pytest.mark.slow
def test_groups_of_equal_rewards_are_replaced_recorded_and_counted(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    train(replace(small_run, env=f"{HERE}:Drawn", practice=PracticeConfig(filter="reward")), tmp_path / "run")
    num_dropped = 0
    for line in lines_of(tmp_path / "run"):
        groups = groups_of(tmp_path / "run", line["step"])
        dead = {key for key, members in groups.items() if is_dead(members)}
        assert len(groups) - len(dead) == small_run.tasks, "as many live groups as a step has"
        assert list(groups) == [f"{line['step']}/{place}" for place in range(len(groups))]
        assert {key for key, members in groups.items() if members[0].advantages is None} == dead
        assert line["filtered_groups"] == line["dead_groups"] == len(dead)
        assert line["refill_episodes"] == 4 * (len(groups) - small_run.tasks)
        assert line["episodes"] == 4 * len(groups)
        num_dropped += len(dead)
    assert num_dropped
    assert verify_run(tmp_path / "run").ok


@pytest.mark.slow
def test_the_groups_that_are_kept_are_those_of_a_run_without_a_filter_and_more(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(small_run, steps=1, group_size=2)
    for name, practice in (("off", PracticeConfig()), ("on", PracticeConfig(filter="reward"))):
        train(replace(config, practice=practice), tmp_path / name)
    off, on = (groups_of(tmp_path / name, 1) for name in ("off", "on"))
    assert set(off) < set(on)
    for key, members in off.items():
        ids = [[record.trajectory.rows[0].ids.tolist() for record in group] for group in (members, on[key])]
        assert ids[0] == ids[1]


@pytest.mark.slow
def test_a_step_without_any_signal_ends_at_the_cap_is_told_once_and_learns_nothing(
    small_run: TrainConfig, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    practice = PracticeConfig(filter="reward", max_refills=2)
    config = replace(
        small_run, env=f"{HERE}:Hopeless", practice=practice, limits=replace(small_run.limits, max_turns=4)
    )
    _, watcher = train(config, tmp_path / "run")
    assert [step.update for step in watcher.steps] == [None, None]
    assert [step.rollout.episodes for step in watcher.steps] == [3 * 4 * 3] * 2
    assert [step.practice for step in watcher.steps] == [{"filtered_groups": 9, "refill_episodes": 24}] * 2
    warnings = [record.getMessage() for record in caplog.records if "rounds of further ones" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith("step 1: 0 of 3 groups have a signal after 2 rounds")
    assert any("dead_groups: " in record.getMessage() for record in caplog.records)
    assert verify_run(tmp_path / "run").ok


@pytest.mark.slow
def test_failed_groups_are_replaced_and_the_failure_share_is_of_the_whole_step(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    practice = PracticeConfig(filter="reward", max_refills=20)
    config = replace(
        small_run, env=f"{HERE}:Fragile", tasks=6, practice=practice, sampler=SamplerConfig(max_failure_rate=0.7)
    )
    train(config, tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert sum(line["failed"] for line in lines) > 0
    for line in lines:
        groups = groups_of(tmp_path / "run", line["step"])
        failed = [key for key, members in groups.items() if all(record.trajectory.reward is None for record in members)]
        dead = [key for key, members in groups.items() if is_dead(members)]
        assert line["filtered_groups"] == len(dead) - len(failed)
        assert len(groups) - len(dead) == 6


@pytest.mark.slow
def test_a_run_with_everything_on_resumes_bitwise(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    practice = PracticeConfig(
        mix={"TextGame-v0": 2, "easy": {"env": "TextGame-v0", "kwargs": {"level": 1}, "levels": []}},
        filter="reward",
        max_refills=1,
        curriculum=CurriculumConfig(method="learnability", values=(2, 3)),
        replay=ReplayConfig(share=0.34),
    )
    config = replace(
        small_run,
        env_kwargs={},
        practice=practice,
        tasks=4,
        group_size=2,
        steps=4,
        checkpoint=CheckpointConfig(every=2),
        eval=HeldOutConfig(episodes=3),
    )
    config = replace(config, limits=replace(config.limits, max_turns=5))
    whole, watcher = train(config, tmp_path / "whole")
    train(replace(config, steps=2), tmp_path / "parts")
    resumed, second = train(config, tmp_path / "parts", resume=True)
    episodes = [(tmp_path / name / "episodes.jsonl.zst").read_bytes() for name in ("whole", "parts")]
    assert episodes[0] == episodes[1]
    assert [step.practice for step in watcher.steps][2:] == [step.practice for step in second.steps]
    first, again = load_decoder(whole.checkpoint), load_decoder(resumed.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert {"TextGame-v0", "easy"} == set(resumed.after.by_env)
    assert sum(part.episodes for part in resumed.after.by_env.values()) == resumed.after.episodes
    last = lines_of(tmp_path / "whole")[-1]
    assert last["replayed_groups/easy"] + last["replayed_groups/TextGame-v0"] > 0
    assert 0 < last["level_share_2/TextGame-v0"] < 1 and "level_share_2/easy" not in last
    levels = Counter(
        record.trajectory.task.kwargs["level"]
        for record in read_episodes(tmp_path / "whole")
        if record.phase == "train"
    )
    assert set(levels) == {1, 2, 3}


@pytest.mark.slow
def test_steps_that_are_dispatched_ahead_take_more_groups_for_those_without_a_signal(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    practice = PracticeConfig(filter="reward", max_refills=20, replay=ReplayConfig(share=0.34))
    train(replace(small_run, max_staleness=1, practice=practice), tmp_path / "run")
    seen: set[str] = set()
    for line in lines_of(tmp_path / "run"):
        groups = groups_of(tmp_path / "run", line["step"])
        live = [key for key, members in groups.items() if not is_dead(members)]
        assert len(live) == small_run.tasks and not seen & set(groups)
        assert line["filtered_groups"] == len(groups) - len(live)
        seen |= set(groups)
    assert verify_run(tmp_path / "run").ok
