"""Environments learned by two commands with no options: `agentgym sft --env ID`, then `agentgym train` from its model.

    python benchmarks/learning_by_default.py runs/by-default [--envs examples/orders.py:Orders ...] [--seeds 0 1 2]

Each is evaluated on 200 held-out tasks before, between and after. What is finished is not run again. Writes
`results.json` and `results.png` into the folder, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentgym.rollout.scores.intervals import share_interval

ENVS = (
    *("GuessNumber-v0", "WordLadder-v0", "Prompt-v0", "ToolPrompt-v0", "Terminal-v0", "Countdown-v0", "Negotiation-v0"),
    *("TicTacToe-v0", "Mastermind-v0", "Sokoban-v0", "Sudoku-v0", "Wordle-v0", "GSM8K-v0", "SearchQA-v0"),
    *("CodeTasks-v0", "Retail-v0", "Math-v0", "examples/orders.py:Orders"),
)
EPISODES = 200
STAGES = ("before", "after lessons", "after training")


def command(words: Sequence[str], log: Path) -> dict[str, Any]:
    """Runs a command of agentgym; returns its JSON, with its seconds and CPU-seconds."""
    began, used = time.monotonic(), _cpu_s()
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "agentgym", *words, "--json"], stdout=subprocess.PIPE, stderr=file, check=False
        )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}, see {log}")
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "wall_s": round(time.monotonic() - began), "cpu_s": round(_cpu_s() - used)}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def learn(env: str, seed: int, folder: Path) -> dict[str, Any]:
    """Teaches and trains; returns the successes of the three stages and what each step took."""
    lessons, run = folder / "lessons", folder / "run"
    common = ["--env", env, "--seed", str(seed), "--eval.episodes", str(EPISODES)]
    folder.mkdir(parents=True, exist_ok=True)
    taught = command(["sft", *common, "--output", str(lessons)], folder / "lessons.log")
    trained = command(["train", *common, "--model", str(lessons), "--output", str(run)], folder / "run.log")
    successes = [taught["success_before"], taught["success_after"], trained["success_after"]]
    took = {name: [taught[name], trained[name]] for name in ("wall_s", "cpu_s")}
    return {"env": env, "seed": seed, "success": dict(zip(STAGES, successes, strict=True)), **took}


def row(result: dict[str, Any]) -> list[str]:
    """Returns the cells of a result in the table."""
    if "failed" in result:
        return [result["env"], str(result["seed"]), result["failed"]]
    shares = [f"{share:.3f} [{low:.3f}, {high:.3f}]" for share, low, high in _intervals(result)]
    times = [f"{wall_s} s ({cpu_s} CPU-s)" for wall_s, cpu_s in zip(result["wall_s"], result["cpu_s"], strict=True)]
    return [result["env"], str(result["seed"]), *shares, *times]


def _intervals(result: dict[str, Any]) -> list[tuple[float, float, float]]:
    rows = []
    for share in result["success"].values():
        won = round(share * EPISODES)
        interval = share_interval([1.0] * won + [0.0] * (EPISODES - won))
        assert interval is not None
        rows.append((share, interval.low, interval.high))
    return rows


def draw(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Draws the three successes of each environment with their 95% intervals."""
    figure = Figure(figsize=(10, 0.45 * len(results) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = [f"{Path(result['env']).name} ({result['seed']})" for result in results]
    for number, stage in enumerate(STAGES):
        points = [_intervals(result)[number] for result in results]
        heights = [place + 0.22 * (1 - number) for place in range(len(results))]
        errors = [[share - low for share, low, _ in points], [high - share for share, _, high in points]]
        axes.errorbar([share for share, _, _ in points], heights, xerr=errors, fmt="o", label=stage, capsize=2)
    axes.set(xlim=(-0.02, 1.02), xlabel=f"success on {EPISODES} held-out tasks", yticks=range(len(labels)))
    axes.set_yticklabels(labels)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3, frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--envs", nargs="+", default=ENVS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args()
    file = options.folder / "results.json"
    results: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    finished = {(result["env"], result["seed"]) for result in results if "failed" not in result}
    for env in options.envs:
        for seed in options.seeds:
            if (env, seed) in finished:
                continue
            name = re.sub(r"\W+", "-", Path(env).name).strip("-").lower()
            try:
                result = learn(env, seed, options.folder / f"{name}-{seed}")
            except RuntimeError as error:
                result = {"env": env, "seed": seed, "failed": str(error)}
            results = [each for each in results if (each["env"], each["seed"]) != (env, seed)] + [result]
            file.write_text(json.dumps(results, indent=1) + "\n")
            print(*row(result), sep=" | ", flush=True)
    draw([result for result in results if "failed" not in result], file.with_suffix(".png"))
    print(*("environment", "seed", *STAGES, "lessons took", "training took"), sep=" | ")
    for result in results:
        print(*row(result), sep=" | ")


if __name__ == "__main__":
    main()
