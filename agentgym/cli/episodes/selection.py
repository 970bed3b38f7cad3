"""The options by which episodes are filtered and sorted, and the lines that they choose."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.errors import ConfigError, nearest
from agentgym.rollout.record.line_reader import LineReader
from agentgym.viewer import EpisodeFilter, RunIndex, count_values, find_lines

__all__ = ["Selection", "chosen_lines"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The episodes that are meant; all of them by default."""

    phase: str = ""
    """Only those of a phase: train, eval_before, eval_during, eval_after, or eval."""
    step: int | None = None
    """Only those of a step."""
    failed: bool = False
    """Only those that did not succeed, or have no reward."""
    contains: str = ""
    """Only those whose observations, replies or calls contain all of these words; '"two words"' follow each other."""
    tool: str = ""
    """Only those that called a tool."""
    error: str = ""
    """Only those with a call that was answered by this error, such as unknown_tool; any: by any error."""
    stop: str = ""
    """Only those that ended for a reason, such as max_turns."""
    task: str = ""
    """Only those whose task (ENV/SEED) contains this."""
    seed: int | None = None
    """Only those of the tasks with a seed."""
    min_reward: float | None = None
    """Only those with this reward or a higher one."""
    max_reward: float | None = None
    """Only those with this reward or a lower one."""
    sort: str = ""
    """Sort by reward, step, turns, tokens or any other column, or by a metric of the episodes."""
    descending: bool = False
    """Sort the highest first."""
    number: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """The number of episodes, the first ones; all by default."""

    @property
    def is_any(self) -> bool:
        """True if an option of the selection is set."""
        return any(getattr(self, each.name) != each.default for each in fields(Selection))


def chosen_lines(selection: Selection, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of the episodes in their order; warns of lines that are no episodes, which are left out."""
    if selection.number is not None and selection.number < 1:
        raise ConfigError(f"--number is at least 1, got {selection.number}")
    condition = EpisodeFilter(
        phase=selection.phase,
        first_step=selection.step,
        last_step=selection.step,
        failed=True if selection.failed else None,
        contains=selection.contains,
        tool=selection.tool,
        error=selection.error,
        stop=selection.stop,
        task=selection.task,
        seed=selection.seed,
        min_reward=selection.min_reward,
        max_reward=selection.max_reward,
    )
    with closing(RunIndex(path.parent)) as index:
        index.update()
        state = index.state()
        _check_values(index, condition)
        matches = find_lines(index, condition, selection.sort or "line", selection.descending, selection.number)
    if state.faults:
        logger.warning("%s: %d lines are left out: %s", path, state.faults, state.fault)
    if not matches:
        logger.warning("%s: no episode fits", path)
    with LineReader(path) as lines:
        for number, offset in matches:
            yield number, lines.line_at(offset)


def _check_values(index: RunIndex, condition: EpisodeFilter) -> None:
    """Raises ConfigError for a phase, a stop reason, a tool or an error that no episode has."""
    counts = count_values(index)
    for name in ("phase", "stop", "tool", "error"):
        value = getattr(condition, name)
        values = [each for each, _ in counts[name]]
        if value and value not in values and (name, value) != ("error", "any"):
            listing = ", ".join(values) or "none"
            raise ConfigError(
                f"no episode has the {name} {value!r:.80}{nearest(value, values) or ':'} There is {listing}"
            )
