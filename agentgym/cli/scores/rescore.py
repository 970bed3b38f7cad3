"""`agentgym rescore`: gives the recorded episodes of a run another reward, and compares it with the old one."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import tyro

from agentgym.cli.display.tables import show_table
from agentgym.cli.options import parse_options
from agentgym.cli.run_folder import settings_of_run
from agentgym.cli.scores import REWARD_SETTINGS
from agentgym.cli.terminal import say, show_json
from agentgym.errors import ConfigError, RunFolderError
from agentgym.evaluation.play.config import plain_settings
from agentgym.evaluation.play.eval_folder import free_folder, name_write_errors
from agentgym.rewards import RewardConfig, Rewards, open_rewards
from agentgym.rewards.reward import with_environment_reward
from agentgym.rollout.record.episodes_file import EpisodeRecord, EpisodeWriter, read_episodes
from agentgym.rollout.record.folder_digests import write_digests
from agentgym.rollout.record.folder_lock import FolderLock
from agentgym.rollout.record.line_reader import FILE_NAME, PACKED_NAME, find_episodes
from agentgym.rollout.record.manifest import replace_file
from agentgym.rollout.record.settings_file import settings_text
from agentgym.rollout.record.task_names import task_names
from agentgym.rollout.scores.intervals import SAME, ZERO_OR_ONE, Interval, difference_interval, mean_interval
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["main"]

CONFIG = "config.yaml"
RESULT = "rescore.json"
RUN_SETTINGS = ("model", "tokenizer", "family", "chat_template", "chat_template_kwargs", "date", "env", "env_kwargs")
"""The settings of the run that readers of its episodes need."""


@dataclass(frozen=True, kw_only=True)
class RescoreOptions:
    """Gives the recorded episodes of a run another reward, without playing, and compares it with the old one."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The new reward."""
    output: Path | None = None
    """The folder for the episodes with their new rewards, which `sft` and `dpo` read as `--episodes`; RUN-rescored
    without it. Nothing is overwritten."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


@dataclass
class _Comparison:
    """The old and the new reward of each episode that has one, and what has none."""

    scored: list[Trajectory] = field(default_factory=list)
    """The episodes with both rewards, without their ids."""
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    num_without: int = 0
    """The episodes that had no reward before, and were not scored."""
    failures: list[str] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    """The number of scored episodes by the phase of the run that played them."""

    def add(self, phase: str, before: Trajectory, after: Trajectory) -> None:
        """Adds an episode before and after it was scored."""
        if before.reward is None:
            self.num_without += 1
        elif after.reward is None:
            self.failures.append(f"{after.group}/{after.member}: {after.error}")
        else:
            self.scored.append(replace(after, rows=()))
            self.old.append(before.reward)
            self.new.append(after.reward)
            self.phases[phase] += 1

    def to_json(self) -> dict[str, JSON]:
        """Returns the numbers as a JSON object; intervals are `[low, high]`, and what cannot be computed is None."""
        names = task_names(self.scored)
        change = [new - old for old, new in zip(self.old, self.new, strict=True)]
        report: dict[str, JSON] = {"num_episodes": len(self.scored)}
        is_share = {*self.old, *self.new} <= ZERO_OR_ONE
        for name, values in (("old", self.old), ("new", self.new), ("difference", change)):
            interval_of = difference_interval if is_share and values is change else mean_interval
            interval = interval_of(values, names) if values else None
            report[f"{name}_mean"] = math.fsum(values) / len(values) if values else None
            report[f"{name}_interval"] = None if interval is None else interval.ends
        report["correlation"] = _correlation(self.old, self.new)
        report["num_changed"] = sum(not math.isclose(by, 0.0, abs_tol=1e-9) for by in change)
        report |= {"num_failed": len(self.failures), "num_without_reward": self.num_without}
        return {**report, "phases": dict(self.phases)}


def main(args: Sequence[str]) -> int:
    """Runs `agentgym rescore ...`; the exit code is 1 if no episode got a reward."""
    main_options = (*REWARD_SETTINGS, "output", "json")
    options = parse_options(RescoreOptions, args, prog="agentgym rescore", main_options=main_options)
    if options.reward == RewardConfig():
        raise ConfigError("rescore needs a reward, such as --reward.function gsm8k or file.py:name")
    run = options.run.parent if options.run.is_file() else options.run
    output = options.output or free_folder(run.with_name(f"{run.resolve().name}-rescored"))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunFolderError(f"{str(output)!r} holds something already: name another folder with --output")
    lock = FolderLock(output)
    comparison, head = asyncio.run(_rescore(options, output, lock))
    result = {**comparison.to_json(), "output": str(output)}
    with name_write_errors(output):
        replace_file(output / CONFIG, settings_text(_settings(run, options.reward)))
        replace_file(output / RESULT, json.dumps(result, indent=2) + "\n")
        write_digests(output, {FILE_NAME: head}, (CONFIG, RESULT))
    lock.release()
    _show(result, comparison.failures)
    if options.json:
        show_json(result)
    return 0 if comparison.scored else 1


async def _rescore(options: RescoreOptions, output: Path, lock: FolderLock) -> tuple[_Comparison, str]:
    """Scores the run's episodes step by step, and writes them; also returns the digest of the last line."""
    comparison = _Comparison()
    async with open_rewards(options.reward) as rewards:
        batches = _steps(options.run)
        first = await _score(rewards, next(batches, []))  # a reward that cannot be used leaves no folder
        with name_write_errors(output):
            output.mkdir(parents=True, exist_ok=True)
        lock.take()
        source = find_episodes(options.run)
        with EpisodeWriter(output, compress=source is not None and source.name == PACKED_NAME) as writer:
            await _record(writer, comparison, *first)
            for batch in batches:
                await _record(writer, comparison, *await _score(rewards, batch))
            return comparison, writer.head


def _steps(run: Path) -> Iterator[list[EpisodeRecord]]:
    """Yields the episodes of each step, which a reward of many episodes compares."""
    for _, records in groupby(read_episodes(run), lambda record: (record.phase, record.step)):
        yield list(records)


async def _score(
    rewards: Rewards, records: Sequence[EpisodeRecord]
) -> tuple[Sequence[EpisodeRecord], list[Trajectory]]:
    return records, await rewards.score([with_environment_reward(record.trajectory) for record in records])


async def _record(
    writer: EpisodeWriter, comparison: _Comparison, records: Sequence[EpisodeRecord], scored: Sequence[Trajectory]
) -> None:
    for record, trajectory in zip(records, scored, strict=True):
        comparison.add(record.phase, record.trajectory, trajectory)
    if records:  # without advantages, which were of the old reward
        await writer.append(scored, phase=records[0].phase, step=records[0].step)


def _settings(run: Path, reward: RewardConfig) -> dict[str, JSON]:
    own = {name: value for name, value in settings_of_run(run).items() if name in RUN_SETTINGS}
    return {"kind": "rescore", "run": str(run), **own, "reward": plain_settings(reward)}


def _correlation(old: Sequence[float], new: Sequence[float]) -> float | None:
    """Returns Pearson's correlation; None if one of the rewards is the same for all."""
    if len(old) < 2 or min(old) == max(old) or min(new) == max(new):
        return None
    return float(np.corrcoef(old, new)[0, 1])


def _show(result: dict[str, JSON], failures: Sequence[str]) -> None:
    rows = []
    for name in ("old", "new", "difference"):
        mean, ends = result[f"{name}_mean"], result[f"{name}_interval"]
        if isinstance(mean, float):
            text = f"{mean:+.3f}" if name == "difference" else f"{mean:.3f}"
            rows.append([name, text, str(Interval(*ends)) if isinstance(ends, list) else SAME])
    show_table(("reward", "mean", "95% interval"), rows)
    correlation = result["correlation"]
    text = f"{correlation:.3f}" if isinstance(correlation, float) else "none: one of the rewards is always the same"
    say(f"correlation {text}")
    say(f"changed     {result['num_changed']} of {result['num_episodes']} episodes")
    if len(phases := cast("dict[str, int]", result["phases"])) > 1:
        counts = ", ".join(f"{number} of {phase}" for phase, number in phases.items())
        say(f"mixed       {counts}: these means are over the episodes of several policies")
    if result["num_without_reward"]:
        say(f"not scored  {result['num_without_reward']} that had failed when they were played")
    if failures:
        say(f"failed      {len(failures)}, which have no reward now. The first, {failures[0]}")
    say(f"episodes    {result['output']}")
