"""`agentgym compare`: several evaluations in one table, with their differences task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.display.tables import show_table
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.errors import ConfigError, RunFolderError
from agentgym.rollout.record.environments_file import changed_environments, read_environments
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.scores.comparison import Difference, paired_difference, scores_by_task
from agentgym.rollout.scores.intervals import SAME, Interval
from agentgym.rollout.scores.statistics import EvalSummary, summarize
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["main"]

COLUMNS = ("run", "tasks", "success", "95% interval", "over the first", "reward", "over the first")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compares evaluations on the tasks that they share, each with the first one."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN RUN ...")]
    """The folders of evaluations, or of training runs, whose last evaluation counts."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym compare ...`."""
    options = parse_options(CompareOptions, args, prog="agentgym compare")
    if len(options.runs) < 2:
        raise ConfigError("two or more runs are compared: name their folders")
    played = [last_evaluation(run) for run in options.runs]
    scores = [scores_by_task(trajectories) for trajectories in played]
    summaries = [summarize(trajectories) for trajectories in played]
    rows, run_lines = [], []
    for run, summary, own in zip(options.runs, summaries, scores, strict=True):
        difference = None if own is scores[0] else paired_difference(scores[0], own)
        rows.append(_row(run, summary, difference, is_first=own is scores[0]))
        run_lines.append(_as_json(run, summary, difference))
    has_rewards = any(summary.mean_reward != summary.success for summary in summaries)
    width = len(COLUMNS) if has_rewards else len(COLUMNS) - 2
    show_table(COLUMNS[:width], [row[:width] for row in rows])
    if any(not scores[0].keys() & own.keys() for own in scores[1:]):
        say("- : no task in common with the first, such as those of another environment")
    environments = [read_environments(run) for run in options.runs]
    for run, played_there in zip(options.runs[1:], environments[1:], strict=True):
        for name in changed_environments(environments[0], played_there):
            say(f"{name} is not the same in {options.runs[0]} and {run}: its code or its data has another digest")
    if options.json:
        show_json({"runs": run_lines})
    return 0


def last_evaluation(run: Path) -> list[Trajectory]:
    """Returns the episodes of an evaluation, or of the last one of a training run.

    Raises RunFolderError for a folder without one.
    """
    phase, step = "", -1
    episodes: list[Trajectory] = []
    for record in read_episodes(run):
        if not record.phase.startswith("eval"):
            continue
        if (record.phase, record.step) != (phase, step):
            phase, step, episodes = record.phase, record.step, []
        episodes.append(record.trajectory)
    if not episodes:
        raise RunFolderError(f"{str(run)!r} has no evaluation: play one with `agentgym eval`")
    return episodes


def _row(run: Path, summary: EvalSummary, difference: Difference | None, *, is_first: bool) -> list[str]:
    tasks = f"{summary.num_tasks}" + (f" (+{summary.num_failed} failed)" if summary.num_failed else "")
    over = ["", ""] if is_first else ["-", "-"]
    if difference is not None:
        over = [
            _with_sign(difference.success, difference.success_interval),
            _with_sign(difference.reward, difference.reward_interval),
        ]
        tasks += f", {difference.num_tasks} shared" if difference.num_tasks < summary.num_tasks else ""
    success, reward = (f"{value or 0:.3f}" for value in (summary.success, summary.mean_reward))
    return [str(run), tasks, success, str(summary.success_interval or ""), over[0], reward, over[1]]


def _with_sign(value: float, interval: Interval | None) -> str:
    return f"{value:+.3f} {interval or SAME}"


def _as_json(run: Path, summary: EvalSummary, difference: Difference | None) -> dict[str, JSON]:
    return {
        "run": str(run),
        "success": summary.success,
        "success_interval": None if summary.success_interval is None else summary.success_interval.ends,
        "mean_reward": summary.mean_reward,
        "num_tasks": summary.num_tasks,
        "over_first": None if difference is None else difference.to_json(),
    }
