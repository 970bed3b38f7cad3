"""A run with all of its instruments: it plays and learns the same, and says how fast it was."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError, RunFolderError
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.speed import ProfileConfig, SpeedConfig
from agentgym.trainers.trackers import TrackingConfig

Train = Callable[..., Any]
OWN = '''
import json

class Lines:
    """Writes down what it is told."""

    def begin(self, run):
        self.path = run.folder / "told.jsonl"
        self.note("begin", run.step, run.config["env"])

    def step(self, step, metrics):
        self.note("step", step, metrics)

    def episodes(self, step, sample):
        self.note("episodes", step, [[one.prompt, one.replies, one.reward, one.status] for one in sample])

    def finish(self):
        self.note("finish")

    def note(self, *what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\\n")


class Breaks(Lines):
    """Fails at its first step."""

    def note(self, *what):
        if what[0] == "step":
            raise RuntimeError("the server is gone")
'''


def told(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.fixture
def small_run(small_run: TrainConfig) -> TrainConfig:
    return replace(small_run, tasks=2, group_size=2)


@pytest.mark.slow
def test_a_run_with_trackers_and_a_trace_plays_and_learns_what_one_without_does(
    small_run: TrainConfig, train: Train, tmp_path: Path, own: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(small_run, tmp_path / "plain")
    watched = replace(
        small_run,
        trackers=(f"{own}:Lines", f"{own}:Breaks"),
        tracking=TrackingConfig(episodes_every=2, episodes=3),
        speed=SpeedConfig(peak_tflops=0.5),
        profile=ProfileConfig(steps=(2,)),
    )
    train(watched, tmp_path / "watched")
    files = [(tmp_path / name / "episodes.jsonl.zst").read_bytes() for name in ("plain", "watched")]
    assert files[0] == files[1]
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "watched")
    ]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    assert "own.py:Breaks failed and is switched off, the run goes on: RuntimeError: the server is gone" in caplog.text

    begun, first, sample, second, finished = told(tmp_path / "watched")
    assert begun == ["begin", 0, "TextGame-v0"] and finished == ["finish"]
    assert [first[:2], sample[:2], second[:2]] == [["step", 1], ["episodes", 1], ["step", 2]]
    numbers = {key: value for key, value in lines[1][0].items() if isinstance(value, int | float) and key != "step"}
    assert first[2] == numbers
    played = [
        record.trajectory for record in read_episodes(tmp_path / "watched" / "episodes.jsonl") if record.step == 1
    ]
    assert len(sample[2]) == 3
    for (prompt, replies, reward, status), episode in zip(sample[2], (played[0], played[1], played[2]), strict=True):
        assert (reward, status) == (episode.reward, episode.status)
        assert "<|im_start|>system" in prompt and str(episode.turns[0].message.content or "") in replies

    with gzip.open(tmp_path / "watched" / "profile" / "step-000002.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert (
        len({event["tid"] for event in events if event.get("cat") == "cpu_op"}) >= 2
    )  # the engine's and the learner's
    assert [path.name for path in (tmp_path / "watched" / "profile").iterdir()] == ["step-000002.json.gz"]


@pytest.mark.long
def test_the_line_of_a_step_holds_its_timings(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    train(replace(small_run, speed=SpeedConfig(peak_tflops=2.0)), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert all(set(line) <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) for line in lines)
    assert any(line["mfu"] is not None for line in lines)
    for line in lines:
        shares = [line[f"{name}_share"] for name in ("generate", "learn", "sync", "rest")]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0 and 0 <= line["bubble"] <= 1
        assert line["generate_share"] * line["step_s"] == pytest.approx(line["generate_s"], abs=0.01)
        assert line["step_s"] >= line["generate_s"] + line["update_s"] - 0.01
        assert line["sampled_tokens_per_s"] == pytest.approx(line["trained_tokens"] / line["generate_s"], rel=0.05)
        if line["mfu"] is not None:
            assert line["padded_tokens"] >= line["packed_tokens"] >= line["computed_tokens"] > 0
            assert line["padding_gain"] == line["padded_tokens"] / line["packed_tokens"]
            assert line["sharing_gain"] > 1  # the members of a group begin with the same prompt
            assert line["trained_tokens_per_s"] > 0


@pytest.mark.slow
def test_a_resumed_run_tells_its_trackers_and_may_have_others(
    small_run: TrainConfig, train: Train, tmp_path: Path, own: str
) -> None:
    train(replace(small_run, steps=1), tmp_path / "run")
    train(replace(small_run, trackers=(f"{own}:Lines",), eval=HeldOutConfig(episodes=2)), tmp_path / "run", resume=True)
    begun, step, *rest = told(tmp_path / "run")
    assert begun[:2] == ["begin", 1]
    assert step[:2] == ["step", 2]
    assert rest[0][1] == 2 and set(rest[0][2]) == {"eval_success", "eval_reward_mean"}
    with pytest.raises(RunFolderError, match="seed"):
        train(replace(small_run, seed=9, trackers=(f"{own}:Lines",)), tmp_path / "run", resume=True)


def test_a_tracker_that_cannot_be_had_ends_the_run_before_anything_is_written(
    small_run: TrainConfig, train: Train, tmp_path: Path, own: str
) -> None:
    with pytest.raises(ConfigError, match="is named twice"):
        train(replace(small_run, trackers=(f"{own}:Lines", f"{own}:Lines")), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"path/to/file\.py:MyTracker"):
        train(replace(small_run, trackers=("own.py",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_that_fails_finishes_its_trackers(
    small_run: TrainConfig, train: Train, tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentgym.trainers.checkpoints.run_folder import RunFolder

    def full(self: RunFolder, metrics: object, episodes: str) -> None:
        raise RunFolderError("no room")

    monkeypatch.setattr(RunFolder, "write_metrics", full)
    with pytest.raises(RunFolderError, match="no room"):
        train(replace(small_run, trackers=(f"{own}:Lines",)), tmp_path / "run")
    assert told(tmp_path / "run")[-1] == ["finish"]


def test_steps_to_trace_begin_at_one() -> None:
    with pytest.raises(ConfigError, match="steps from 1 on, got 0"):
        ProfileConfig(steps=(2, 0))
