"""Learning curves of the algorithms, from the embedded model, three seeds each: one picture and one table.

Every run is a process of `agentgym train`, one after another. A run that is finished is not run again and one that was
cut off goes on, so the same command may be given again, with more algorithms or seeds. The options after `--` go to
every run.

    python benchmarks/algorithms.py [--algo grpo ppo ...] [--seeds 1 2 3] [--steps 40] [-- --tasks 8]

With `--horizon`, the many-turn comparison: LongRoad-v0, where one early turn of 32 decides. Each algorithm gets the
learning rate of `--rates` with which it learns in the fewest episodes on a seed of its own, then plays the seeds with
it; a run ends when its training success over the last 128 episodes reaches the target.

    python benchmarks/algorithms.py --horizon
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from training_runs import Result, Run, draw, play, show

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "grpo": ("--algo", "grpo"),
    "ppo": ("--algo", "ppo"),
    "rloo": ("--algo", "rloo"),
    "reinforce_plus_plus": ("--algo", "reinforce_plus_plus"),
    "gspo": ("--algo", "gspo"),
    "cispo": ("--algo", "cispo"),
    "dapo": ("--algo", "dapo"),
    "gigpo": ("--algo", "gigpo"),
}
"""The options of `agentgym train` by name."""
HORIZON: Mapping[str, tuple[str, ...]] = {
    "turn_group": ("--algo", "turn_group", "--advantage.settings", "gamma=0"),
    "grpo": ("--algo", "grpo"),
}
EPISODE_LEVEL, TURN_LEVEL = "grpo", "turn_group"
HORIZON_OPTIONS = ("--tasks", "4", "--group-size", "4", "--eval.episodes", "0", "--checkpoint.every", "10")
TUNING_SEED = 0


def compare(arguments: argparse.Namespace, table: Mapping[str, tuple[str, ...]]) -> list[Result]:
    """Runs every algorithm with every seed."""
    results = []
    for name in arguments.algo or list(table):
        result = Result(name)
        for seed in arguments.seeds:
            options = (*common(arguments), *table[name], "--seed", str(seed), *arguments.rest)
            result.play(Run(name, seed, options, arguments.output / f"{name}-seed{seed}"))
        results.append(result)
    return results


def compare_horizon(arguments: argparse.Namespace) -> list[Result]:
    """Runs every algorithm with every seed, at the rate that is its best on the tuning seed."""
    results = []
    for name in arguments.algo or list(HORIZON):
        best = _best_rate(arguments, name) if len(arguments.rates) > 1 else arguments.rates[0]
        result = Result(f"{name} (rate {best:g})")
        for seed in arguments.seeds:
            result.play(_horizon_run(arguments, name, best, seed))
        results.append(result)
    return results


def _best_rate(arguments: argparse.Namespace, name: str) -> float:
    tried = {rate: _horizon_run(arguments, name, rate, TUNING_SEED) for rate in arguments.rates}
    for rate, run in tried.items():
        if problem := play(run):
            sys.exit(f"{name} at the rate {rate}: {problem}")
    return min(tried, key=lambda rate: _quality(tried[rate], arguments.target))


def _quality(run: Run, target: float) -> tuple[float, float]:
    """Returns a sort key: fewer episodes are better; of runs that missed the target, the one that came nearest."""
    point = run.first_point_at(target)
    nearest = max((point.moving for point in run.points if point.moving == point.moving), default=0.0)
    return (point.episodes if point else math.inf), -nearest


def _horizon_run(arguments: argparse.Namespace, name: str, rate: float, seed: int) -> Run:
    own = ("--optimizer.learning-rate", f"{rate:g}", "--seed", str(seed))
    options = (*common(arguments), *HORIZON_OPTIONS, *HORIZON[name], *own, *arguments.rest)
    folder = arguments.output / f"{name}-rate{rate:g}-seed{seed}"
    return Run(name, seed, options, folder, stop_at=arguments.target)


def common(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the options of every run."""
    capped = ("--max-minutes", f"{arguments.max_minutes:g}")
    threads = ("--learner.threads", str(arguments.threads)) if arguments.threads else ()
    return "--env", arguments.env, "--steps", str(arguments.steps), *capped, *threads


def ratio(results: Sequence[Result], target: float) -> float | None:
    """Returns the episodes that turn-level credit needs over those of episode-level credit; None if one is missing.

    A run that missed the target counts with the episodes it played, which are fewer than it needs.
    """
    needed = {}
    for result in results:
        episodes = [(run.first_point_at(target) or run.points[-1]).episodes for run in result.runs]
        if result.label.startswith(TURN_LEVEL) and len(result.points_at(target)) < len(result.runs):
            return None
        needed[result.label.partition(" ")[0]] = statistics.fmean(episodes) if episodes else math.nan
    if {EPISODE_LEVEL, TURN_LEVEL} - set(needed):
        return None
    return needed[TURN_LEVEL] / needed[EPISODE_LEVEL]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments; those after `--` are `rest`."""
    split = list(words).index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horizon", action="store_true", help="compare credit on LongRoad-v0")
    parser.add_argument("--algo", nargs="+", metavar="NAME", help=f"of {', '.join(ALGORITHMS)}; by default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; 40, or 80 with --horizon")
    parser.add_argument("--env", help="by default TextGame-v0, or LongRoad-v0 with --horizon")
    parser.add_argument("--target", type=float, help="success to reach; 0.8, or 0.9 with --horizon")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 2e-4, 4e-4], help="with --horizon")
    parser.add_argument("--max-minutes", type=float, default=60, help="of training, a run")
    parser.add_argument("--threads", type=int, help="CPU threads of learning; by default one a core")
    parser.add_argument("--output", type=Path, help="by default runs/algorithms or runs/horizon")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args(list(words)[:split])
    arguments.rest = tuple(list(words)[split + 1 :])
    usual = (80, "LongRoad-v0", 0.9, Path("runs/horizon"))
    if not arguments.horizon:
        usual = (40, "TextGame-v0", 0.8, Path("runs/algorithms"))
    for name, value in zip(("steps", "env", "target", "output"), usual, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    table = HORIZON if arguments.horizon else ALGORITHMS
    if unknown := [name for name in arguments.algo or () if name not in table]:
        parser.error(f"unknown algorithm {unknown[0]!r}; there are {', '.join(table)}")
    return arguments


def main() -> None:
    """Plays what is missing, then prints the table and draws the picture."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, its children too
    arguments = parse(sys.argv[1:])
    results = compare_horizon(arguments) if arguments.horizon else compare(arguments, ALGORITHMS)
    show(results, arguments.target)
    report: dict[str, object] = {"results": [result.to_json(arguments.target) for result in results]}
    if arguments.horizon:
        report["ratio"] = ratio(results, arguments.target)
        ratio_text = "not known" if report["ratio"] is None else f"{report['ratio']:.2f}"
        print(f"{TURN_LEVEL} needs {ratio_text} of the episodes of {EPISODE_LEVEL}; wanted: at most 0.5")
    picture = arguments.output / "curves.png"
    draw(results, arguments.target, picture)
    (arguments.output / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"curves {picture}   numbers {arguments.output / 'results.json'}")
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
