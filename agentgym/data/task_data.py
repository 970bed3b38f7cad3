"""`open_data` converts files to the tasks to train on and the tasks to evaluate on, with a report."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from agentgym.data.config import DataConfig
from agentgym.data.lengths import CountTokens, without_long_prompts
from agentgym.data.rows import Placed, layout_of, read_tasks
from agentgym.data.sources import open_sources
from agentgym.data.split import hold_out, keep_apart
from agentgym.errors import ConfigError
from agentgym.types import Task

__all__ = ["TaskData", "open_data"]

logger = logging.getLogger("agentgym.data")


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The tasks of a run: `TaskData(train=(task, ...), eval=(), report=("train: 20 tasks from a.jsonl (...)",))`."""

    train: tuple[Task, ...]
    eval: tuple[Task, ...]
    report: tuple[str, ...]
    """Readable lines on the columns that were read, and the rows that were dropped and split."""

    @property
    def env_ids(self) -> tuple[str, ...]:
        """The environments that play the tasks."""
        return tuple(sorted({task.env_id for task in (*self.train, *self.eval)}))

    def log_report(self) -> None:
        """Logs the report at level INFO of `agentgym.data`, which every command shows."""
        for line in self.report:
            logger.info("%s", line)


def open_data(config: DataConfig, count_tokens: CountTokens | None = None, env_id: str | None = None) -> TaskData:
    """Reads all files of `config`, checks every row, drops prompts that are too long, and keeps train and eval apart.

    `count_tokens` counts a prompt, rendered for the model; it is called only if `max_prompt_tokens` is set. `env_id`
    plays the rows that name no environment themselves; None is Prompt-v0.

    Raises ConfigError, naming file, row and column; UnknownName for a name in the user's code; EnvironmentFault for an
    exception of a generator.
    """
    if not (config.train or config.eval):
        raise ConfigError("there is no data: train and eval name no files")
    report: list[str] = []
    train = _read("train", config.train_files, config, env_id, report)
    held_out = _read("eval", config.eval_files, config, env_id, report)
    if config.eval_fraction:
        train, held_out = hold_out(train, config.eval_fraction)
        report.append(f"eval_fraction {config.eval_fraction:g}: {len(train)} tasks train, {len(held_out)} evaluate")
    train, held_out, line = keep_apart(train, held_out, config.overlap)
    report += [line] if line else []
    if config.max_prompt_tokens is not None:
        train = _drop_long_prompts("train", train, config.max_prompt_tokens, count_tokens, report)
        held_out = _drop_long_prompts("eval", held_out, config.max_prompt_tokens, count_tokens, report)
    tasks = (tuple(row.task for row in rows) for rows in (train, held_out))
    return TaskData(train=next(tasks), eval=next(tasks), report=tuple(report))


def _read(side: str, names: tuple[str, ...], config: DataConfig, env_id: str | None, report: list[str]) -> list[Placed]:
    rows: list[Placed] = []
    for table in open_sources(names, config.max_rows):
        tasks = list(read_tasks(table, config, env_id))
        columns_text = f" ({layout_of(table, config).describe_columns(table)})" if table.columns else ""
        report.append(f"{side}: {len(tasks)} tasks from {table.name}{columns_text}")
        rows += tasks
    repeated = len(rows) - len({row.prompt for row in rows})
    if repeated:
        report.append(f"{side}: {repeated} of {len(rows)} rows repeat the prompt of another one, and are kept")
    return rows


def _drop_long_prompts(
    side: str, rows: list[Placed], max_prompt_tokens: int, count_tokens: CountTokens | None, report: list[str]
) -> list[Placed]:
    if count_tokens is None:
        raise ConfigError("max_prompt_tokens needs a tokenizer to count with, and there is none here: leave it out")
    short_rows, line = without_long_prompts(rows, max_prompt_tokens, count_tokens)
    report += [f"{side}: {line}"] if line else []
    return short_rows
