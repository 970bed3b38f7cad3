"""Runs of `agentgym train` that a benchmark compares: each is played once, and all are drawn into one picture."""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from agentgym.rollout.record.line_reader import find_episodes
from agentgym.rollout.scores.statistics import success_interval
from agentgym.viewer.run_data import read_run

__all__ = ["Point", "Result", "Run", "draw", "play", "show"]

WINDOW_EPISODES = 128
"""The number of latest episodes that training success is computed over."""
POLL_S = 1.0


@dataclass(frozen=True)
class Point:
    """Training after one step."""

    episodes: int
    seconds: float
    success: float
    """The success of the step's episodes."""
    moving: float
    """The success of the last `WINDOW_EPISODES`; NaN before there are as many."""


@dataclass(frozen=True)
class Run:
    """One run: its algorithm, seed, options and folder."""

    label: str
    seed: int
    options: tuple[str, ...]
    folder: Path
    stop_at: float | None = None
    """The moving success at which the run is ended."""

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to do; ends the program if the folder contains a run with other options."""
        marker = self.folder / "benchmark.json"
        if not marker.is_file():
            return False
        if json.loads(marker.read_text())["options"] != list(self.options):
            sys.exit(f"{self.folder} holds a run with other options (benchmark.json): give another --output")
        return True

    @property
    def points(self) -> list[Point]:
        """The curve so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        points: list[Point] = []
        past: list[tuple[int, float]] = []
        for line in lines:
            try:
                step = json.loads(line)
            except ValueError:  # the line that is being written
                break
            past.append((step["episodes"], step["success"]))
            played = sum(number for number, _ in past)
            points.append(Point(played, step["elapsed_s"], step["success"], _moving(past)))
        return points

    def first_point_at(self, target: float) -> Point | None:
        """Returns the first point with a moving success of at least `target`."""
        return next((point for point in self.points if point.moving >= target), None)

    def held_out(self) -> tuple[list[float], list[str]]:
        """Returns the successes of the evaluation after training, and the tasks they belong to."""
        if find_episodes(self.folder) is None:
            return [], []
        episodes = [
            episode
            for episode in read_run(self.folder).episodes
            if episode.phase == "eval_after" and episode.reward is not None
        ]
        last = max((episode.step for episode in episodes), default=0)  # a run that went on was also evaluated before
        episodes = [episode for episode in episodes if episode.step == last]
        return [float(bool(episode.success)) for episode in episodes], [episode.group for episode in episodes]


@dataclass
class Result:
    """The runs of one algorithm over the seeds."""

    label: str
    runs: list[Run] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """The last messages of the runs that did not work."""

    def play(self, run: Run) -> None:
        """Plays a run, and adds it or what went wrong."""
        if problem := play(run):
            self.failed.append(problem)
        else:
            self.runs.append(run)

    def points_at(self, target: float) -> list[Point]:
        """Returns the first such points of the runs that reached `target`."""
        return [point for run in self.runs if (point := run.first_point_at(target)) is not None]

    def row(self, target: float) -> list[str]:
        """Returns the line of the table."""
        points = self.points_at(target)
        successes, tasks = [], []
        for run in self.runs:
            more = run.held_out()
            successes += more[0]
            tasks += more[1]
        interval = success_interval(successes, tasks)
        held_out = f"{statistics.fmean(successes):.3f} {interval}" if successes else "-"
        episodes = _spread([point.episodes for point in points])
        count = f"{len(points)}/{len(self.runs) + len(self.failed)}"
        return [self.label, count, episodes, _spread([point.seconds for point in points]), held_out]

    def to_json(self, target: float) -> dict[str, object]:
        """Returns the object for `--json` and `results.json`."""
        seeds = [
            {"seed": run.seed, "folder": str(run.folder), "reached": asdict(point) if point else None}
            for run in self.runs
            for point in [run.first_point_at(target)]
        ]
        return {"algorithm": self.label, "seeds": seeds, "failed": self.failed, "row": self.row(target)}


def _moving(past: Sequence[tuple[int, float]]) -> float:
    total, number = 0.0, 0
    for episodes, success in reversed(past):
        total, number = total + episodes * success, number + episodes
        if number >= WINDOW_EPISODES:
            return total / number
    return math.nan


def _spread(numbers: Sequence[float]) -> str:
    """Formats mean, least and most."""
    if not numbers:
        return "-"
    return f"{statistics.fmean(numbers):,.0f} ({min(numbers):,.0f} to {max(numbers):,.0f})"


def play(run: Run) -> str:
    """Trains until the run is finished; returns what went wrong, or an empty string."""
    if run.is_finished:
        print(f"{run.folder}: finished before", flush=True)
        return ""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    again = ["--resume"] if (run.folder / "config.yaml").is_file() else []
    whole = ("--target-success", "None")  # all runs take all steps
    command = [sys.executable, "-m", "agentgym", "train", *whole, *run.options, "--output", str(run.folder), *again]
    log = run.folder.parent / f"{run.folder.name}.log"  # the name may hold a rate, and so a dot
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            stopped = _wait(process, run)
        except BaseException:
            process.send_signal(signal.SIGINT)  # it writes a checkpoint
            process.wait()
            raise
    if process.returncode and not stopped:
        lines = log.read_text().strip().splitlines() or ["it said nothing"]
        print(f"{run.folder}: exit code {process.returncode}, see {log}", flush=True)
        return lines[-1]
    (run.folder / "benchmark.json").write_text(json.dumps({"options": list(run.options)}) + "\n")
    last, spent_s = run.points[-1], time.monotonic() - began
    success = last.success if math.isnan(last.moving) else last.moving
    print(f"{run.folder}: success {success:.2f} after {last.episodes:,} episodes, {spent_s:.0f} s", flush=True)
    return ""


def _wait(process: subprocess.Popen[bytes], run: Run) -> bool:
    """Waits for the end; returns True if the run was ended because it reached its target."""
    while process.poll() is None:
        if run.stop_at is not None and run.first_point_at(run.stop_at) is not None:
            process.send_signal(signal.SIGINT)
            process.wait()
            return True
        time.sleep(POLL_S)
    return False


def draw(results: Sequence[Result], target: float, path: Path) -> None:
    """Draws success against episodes and against seconds: a thin line for each seed, a thick one for their mean."""
    figure = Figure(figsize=(12, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = zip(figure.subplots(1, 2, sharey=True), ("episodes", "seconds"), strict=True)
    for axes, key in panels:
        ends = []
        for number, result in enumerate(results):
            curves = [curve for run in result.runs if len(curve := _curve(run, key)[0])]
            for run in result.runs:
                across, moving = _curve(run, key)
                axes.plot(across, moving, color=f"C{number}", linewidth=0.8, alpha=0.3)
                ends += list(across[-1:])
            if curves:
                across = np.linspace(max(curve[0] for curve in curves), min(curve[-1] for curve in curves), 200)
                mean = np.mean([np.interp(across, *_curve(run, key)) for run in result.runs], axis=0)
                axes.plot(across, mean, color=f"C{number}", linewidth=1.8, label=result.label)
        axes.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        axes.set_xlabel(f"{key} of training")
        axes.set_ylim(-0.03, 1.03)
        if ends:  # a run that is far longer than the others is shown as far as they go
            axes.set_xlim(0, min(max(ends), 1.4 * statistics.median(ends)))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if key == "episodes" and axes.get_legend_handles_labels()[0]:
            axes.set_title(f"success of the last {WINDOW_EPISODES} episodes", loc="left", fontweight="bold")
            axes.legend(frameon=False)
    figure.savefig(path, metadata={"Software": None})


def _curve(run: Run, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns episodes or seconds, and the moving success there."""
    points = [point for point in run.points if point.moving == point.moving]
    return np.array([getattr(point, key) for point in points]), np.array([point.moving for point in points])


def show(results: Sequence[Result], target: float) -> None:
    """Prints the table."""
    head = ["algorithm", "seeds", f"episodes to {target:g}", f"seconds to {target:g}", "held-out success"]
    rows = [head, *(result.row(target) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for result in results:
        for problem in result.failed:
            print(f"{result.label}: {problem}")
