"""`agentgym rescore`: recorded episodes get another reward beside the old ones, and training reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.trajectory import Status, StopReason, Trajectory, Turn
from agentgym.types import Message, Task

Command = Callable[..., Any]
REWARDS = """
def short(trajectory, task, *, scale: float = 1.0):
    return scale * (10 - len(trajectory.turns[-1].message.content))


def place(trajectories, tasks):
    return [float(index) for index in range(len(tasks))]


def seen(trajectory, task):
    return sum(len(turn.observation) for turn in trajectory.turns)


def picky(trajectory, task):
    if task.seed == 1:
        raise ValueError("not this one")
    return trajectory.reward


def inside(environment):
    return 1.0
"""


def episode(seed: int, reward: float | None, text: str) -> Trajectory:
    failed = reward is None
    return Trajectory(
        task=Task("Ask-v0", seed, {"ground_truth": "red"}),
        group=f"0/{seed}",
        member=0,
        rows=(),
        turns=(Turn(Message("assistant", "hm"), 0.0, "go on"), Turn(Message("assistant", text), reward)),
        status=Status.ENV_ERROR if failed else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
        error="it broke" if failed else None,
    )


@pytest.fixture
def run(tmp_path: Path, agentgym: Command) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    folder = tmp_path / "run"
    folder.mkdir()
    with EpisodeWriter(folder) as writer:
        writer.write([episode(0, 1.0, "red"), episode(1, 0.0, "a bird")], step=1)
        writer.write([episode(2, 0.5, "red"), episode(3, None, "")], step=2)
    return folder


def rewards(folder: Path) -> list[float | None]:
    return [record.trajectory.reward for record in read_episodes(folder)]


def test_the_new_rewards_are_written_beside_the_old(agentgym: Command, run: Path) -> None:
    before = (run / "episodes.jsonl").read_bytes()
    words = ("--reward.function", "mine.py:short", "--reward.settings", "scale=0.1")
    done = agentgym("rescore", "run", *words, "--json")
    assert done.code == 0, done.err
    output = Path(done.json["output"])
    assert rewards(output) == pytest.approx([0.7, 0.4, 0.7, None])
    assert (run / "episodes.jsonl").read_bytes() == before
    assert [record.step for record in read_episodes(output)] == [1, 1, 2, 2]
    assert done.json["old_mean"] == pytest.approx(0.5) and done.json["new_mean"] == pytest.approx(0.6)
    assert done.json["difference_mean"] == pytest.approx(0.1)
    assert done.json["correlation"] == pytest.approx(0.866, abs=1e-3)
    counts = ("num_episodes", "num_changed", "num_failed", "num_without_reward")
    assert [done.json[name] for name in counts] == [3, 3, 0, 1]
    low, high = done.json["new_interval"]
    assert low < 0.6 < high
    again = agentgym("rescore", "run", *words)
    assert Path("run-rescored-2").is_dir() and again.code == 0
    for line in ("old          0.500", "new          0.600", "correlation 0.866", "changed     3 of 3 episodes"):
        assert line in again.out, again.out
    assert "not scored  1 that had failed when they were played" in again.out


def test_the_phases_of_a_training_run_are_named(agentgym: Command, run: Path) -> None:
    alone = agentgym("rescore", "run", "--reward.function", "mine.py:short", "--json")
    assert alone.json["phases"] == {"train": 3} and "mixed" not in alone.err
    with EpisodeWriter(Path("run")) as writer:
        writer.write([episode(7, 1.0, "red"), episode(8, None, "")], phase="eval_after", step=2)
    done = agentgym("rescore", "run", "--reward.function", "mine.py:short")
    assert "mixed       3 of train, 1 of eval_after: these means are over the episodes of several policies" in done.out


def test_a_reward_of_0_and_1_has_the_interval_of_a_share(agentgym: Command, run: Path) -> None:
    folder = Path("won")
    folder.mkdir()
    with EpisodeWriter(folder) as writer:
        writer.write([episode(seed, 1.0, "red") for seed in range(20)], step=1)
    same = agentgym("rescore", "won", "--reward.function", "exact_match", "--json").json
    reach = 1 - 0.025 ** (1 / 20)
    assert same["old_interval"] == same["new_interval"] == pytest.approx([1 - reach, 1.0])
    assert same["difference_interval"] == pytest.approx([-reach, reach])
    answer = agentgym("rescore", "won", "--reward.function", "mine.py:short")
    assert re.search("new +7.000 +in every task", answer.out)


def test_a_reward_of_a_step_scores_its_episodes_together(agentgym: Command, run: Path) -> None:
    assert agentgym("rescore", "run", "--reward.function", "mine.py:place", "--output", "new").code == 0
    assert rewards(Path("new")) == [0.0, 1.0, 0.0, None]
    assert json.loads(Path("new/rescore.json").read_text())["num_changed"] == 3


def test_a_reward_that_builds_on_the_environments_finds_it_again(agentgym: Command, run: Path) -> None:
    agentgym("rescore", "run", "--reward.function", "mine.py:place", "--output", "once")
    agentgym("rescore", "once", "--reward.function", "environment", "mine.py:short=0", "--output", "twice")
    assert rewards(Path("twice")) == [1.0, 0.0, 0.5, None]


def test_episodes_that_cannot_be_scored_are_counted_with_a_reason(agentgym: Command, run: Path) -> None:
    done = agentgym("rescore", "run", "--reward.function", "mine.py:picky", "--output", "new")
    assert done.code == 0
    assert "failed      1, which have no reward now. The first, 0/1/0: the reward failed: ValueError: not this one" in (
        done.out
    )
    assert rewards(Path("new")) == [1.0, None, 0.5, None]
    none = agentgym("rescore", "run", "--reward.function", "format", "--reward.settings", "pattern=x", "--output", "no")
    assert "none: one of the rewards is always the same" in none.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "rescore needs a reward, such as --reward.function gsm8k"),
        (("--reward.function", "gsm8"), "did you mean 'gsm8k'"),
        (("--reward.function", "mine.py:inside"), "recorded episodes have none any more"),
        (("--reward.function", "gsm8k", "--output", "run"), "'run' holds something already"),
        (("--reward.functoin", "gsm8k"), "--reward.function"),
    ],
)
def test_a_mistake_writes_nothing(words: tuple[str, ...], message: str, agentgym: Command, run: Path) -> None:
    done = agentgym("rescore", "run", *words)
    assert done.code == 2 and message in done.err
    assert not Path("run-rescored").exists()
    assert agentgym("rescore", "nothing", "--reward.function", "gsm8k").code == 2


@pytest.mark.slow
def test_sft_and_dpo_read_the_new_rewards(agentgym: Command, run: Path) -> None:
    play = (
        "eval",
        "--env",
        "TextGame-v0",
        "--policy",
        "random",
        "--tokenizer",
        "embedded",
        "-n",
        3,
        "-r",
        3,
        "--max-turns",
        4,
    )
    assert agentgym(*play, "--output", "played").code == 0
    assert agentgym("rescore", "played", "--reward.function", "mine.py:seen", "--output", "new").code == 0
    assert len({*rewards(Path("new"))}) > 1
    assert agentgym("verify", "new").code == 0
    for command, more in (("dpo", ()), ("sft", ("--min-reward", -100))):
        done = agentgym(command, "--episodes", "new", *more, "--steps", 1, "--output", command)
        assert done.code == 0, done.err


@pytest.mark.long
def test_it_needs_no_torch(run: Path) -> None:
    code = (
        "import sys\nfrom agentgym.cli.main import main\n"
        "code = main(['rescore', 'run', '--reward.function', 'mine.py:short', 'exact_match=2'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=run.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rewards(run.with_name("run-rescored")) == [9.0, 4.0, 9.0, None]
