"""A run that is killed again and again, at random moments, against one that is not: `python benchmarks/kills.py`.

Both train the same small run with every checkpoint kept. The killed one gets SIGKILL at seeded random moments, of a
step or of a checkpoint in writing, and is resumed each time; in the end its episodes, its metrics (but for times), its
weights and its optimizer state are held against the other's, bit for bit. The environment draws from the process's own
random numbers too. With `--signal TERM` the run gets SIGTERM instead, and must end by itself with exit code 143 and a
checkpoint of its last step. Exit code 1 where anything differs.

    python benchmarks/kills.py [--kills 20] [-- --model FOLDER --learner.lora.rank 8]

What is behind `--` goes to every `agentgym train`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentgym.rollout.record.chain import CHAIN
from agentgym.trainers.speed.step_speed import OF_THE_MACHINE

ENV = '''
import random

import numpy as np
import torch

from agentgym.envs.games.text_game.env import TextGame
from agentgym.rewards import Reward


class Luck(TextGame):
    """The text game with a world that the process's own random generators draw."""

    def start(self, options):
        world = random.randrange(100) + 100 * int(np.random.randint(100)) + 10_000 * int(torch.randint(100, ()))
        self.np_random = np.random.default_rng(world)
        return super().start(options)


def varied(trajectory, task):
    """A reward that differs between episodes, so that a random model learns too."""
    return Reward(sum(int(row.ids.sum()) for row in trajectory.rows) % 7 / 7)
'''


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The point at which a run was killed."""

    after_step: int
    """The last step on record."""
    in_writing: bool
    """True if a checkpoint was half-written."""
    checkpoint: int
    """The newest checkpoint."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often the run is killed")
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL", help="what the run gets")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, and of the run")
    parser.add_argument("--every", type=int, default=1, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, help="where the runs stay; by default they are removed")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.rest = sys.argv[split + 1 :]
    with tempfile.TemporaryDirectory() as removed:
        folder = options.folder or Path(removed)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "luck.py").write_text(ENV)
        steps = (3 * options.kills + 3) * options.every  # each may see two or three
        started = time.perf_counter()
        subprocess.run(command(folder, "whole", steps, options), check=True, stdout=subprocess.DEVNULL)
        step_s = step_seconds(folder / "whole")
        print(f"{steps} steps undisturbed: {time.perf_counter() - started:.0f} s, {step_s:.2f} s a step", flush=True)
        moments = random.Random(options.seed)
        for number in range(1, options.kills + 1):
            kill = kill_run(folder, steps, options, moments.uniform(0, 2 * step_s))
            if kill is None:
                print(f"kill {number}: the run was done before")
                break
            writing = ", a checkpoint half-written" if kill.in_writing else ""
            print(f"kill {number}: after step {kill.after_step}, checkpoint {kill.checkpoint}{writing}", flush=True)
        subprocess.run(command(folder, "killed", steps, options), check=True, stdout=subprocess.DEVNULL)
        differing = differences(folder / "whole", folder / "killed")
    print(
        "differs: " + ", ".join(differing) if differing else "episodes, metrics, weights and optimizer: bitwise equal"
    )
    return 1 if differing else 0


def command(folder: Path, name: str, steps: int, options: argparse.Namespace) -> list[str]:
    run = folder / name
    resume = ["--resume"] if (run / "config.yaml").exists() else []
    settings = f"--tasks 2 --group-size 2 --eval.episodes 0 --limits.max-turns 6 --seed {options.seed} --steps {steps}"
    checkpoints = f"--checkpoint.every {options.every}"
    env = ["--env", f"{folder / 'luck.py'}:Luck", "--env-kwargs", "level=1"]
    reward = ["--reward.function", f"{folder / 'luck.py'}:varied"]
    model = ["--model", "embedded"]  # the small one: a step of the large one takes ten times as long
    train = [sys.executable, "-m", "agentgym", "train", *env, *reward, *model, *settings.split(), *checkpoints.split()]
    return [*train, *options.rest, "--output", str(run), *resume]


def kill_run(folder: Path, steps: int, options: argparse.Namespace, delay_s: float) -> Kill | None:
    """Resumes the run until it has a new step and `delay_s` have passed, and kills it; None if it was done before."""
    run = folder / "killed"
    before = num_steps(run)
    with subprocess.Popen(command(folder, "killed", steps, options), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and num_steps(run) <= before:
            time.sleep(0.005)
        deadline = time.monotonic() + delay_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if process.poll() is not None:
            return None
        process.send_signal(getattr(signal, f"SIG{options.signal}"))
        code = process.wait(timeout=600)
    if code != (143 if options.signal == "TERM" else -signal.SIGKILL):
        return None if not code else sys.exit(f"the run ended with exit code {code}")
    names = os.listdir(run / "checkpoints") if (run / "checkpoints").exists() else []
    return Kill(
        after_step=num_steps(run),
        in_writing=any(name.endswith(".part") for name in names),
        checkpoint=max([int(name[5:]) for name in names if name.startswith("step-")], default=0),
    )


def num_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def step_seconds(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(lines[-1]["elapsed_s"]) / len(lines)


def differences(whole: Path, other: Path) -> list[str]:
    """Returns the parts of two runs that are not bitwise equal."""
    files = []
    if (whole / "episodes.jsonl.zst").read_bytes() != (other / "episodes.jsonl.zst").read_bytes():
        files.append("episodes.jsonl.zst")
    if lines_without_times(whole) != lines_without_times(other):
        files.append("metrics.jsonl")
    names = sorted(path.name for path in (whole / "checkpoints").glob("step-*"))
    if names != sorted(path.name for path in (other / "checkpoints").glob("step-*")):
        files.append("the checkpoints there are")
    for name in names:
        first, second = whole / "checkpoints" / name, other / "checkpoints" / name
        for file in ("model.safetensors", "state.json", "learner/structure.json", "learner/__0_0.distcp"):
            if first.exists() and second.exists() and (first / file).read_bytes() != (second / file).read_bytes():
                files.append(f"{name}/{file}")
    return files


def lines_without_times(run: Path) -> list[Mapping[str, object]]:
    """Returns the lines of metrics.jsonl without the entries that depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line[name] for name in line if not name.endswith("_s") and name not in (CHAIN, *OF_THE_MACHINE)}
        for line in lines
    ]


if __name__ == "__main__":
    sys.exit(main())
