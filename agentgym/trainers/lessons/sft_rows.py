"""The rows that supervised fine-tuning learns from instead of demonstrations, with a report of what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.data.sources import open_sources
from agentgym.errors import ConfigError, RenderError
from agentgym.trainers.lessons.conversations import TOOLS, conversation_of, conversation_rows
from agentgym.trainers.lessons.demonstrations import Demonstration
from agentgym.trainers.lessons.recorded_episodes import choose_episodes, episode_rows, held_out_lines, read_played
from agentgym.types import Task

__all__ = ["ConversationSource", "EpisodeSource", "SftRows", "rows_of_file"]

NULLABLE = ("default", "const")
"""The keywords of JSON Schema with a value that may be null."""


@dataclass(frozen=True, kw_only=True)
class ConversationSource:
    """Files of conversations, named as in `data.train`."""

    paths: tuple[str, ...]
    skip_malformed: bool = False
    """Leaves out rows that are no conversation, or cannot be rendered in the model's chat format, without an error."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSource:
    """Run folders with recorded episodes."""

    paths: tuple[Path, ...]
    min_reward: float | None = None
    best_per_task: int | None = None


@dataclass(frozen=True, kw_only=True)
class SftRows:
    """The rows to learn, and a report of their sources."""

    rows: tuple[Demonstration, ...]
    report: tuple[str, ...]
    """Lines with the number of learned items, and the number that was left out by reason."""
    task: Task | None = None
    """A task of the episodes; None if the rows come from conversations."""

    @classmethod
    def of_conversations(cls, source: ConversationSource, renderer: TemplateRenderer, window: int) -> SftRows:
        """Reads the rows of files; raises ConfigError, naming the row, for a conversation that cannot be learned."""
        rows: list[Demonstration] = []
        num_read = 0
        malformed: list[str] = []
        for path in source.paths:
            for where, row in rows_of_file(path, "conversation"):
                num_read += 1
                try:
                    rows += conversation_rows(renderer, conversation_of(row))
                except (ConfigError, RenderError) as error:
                    if not source.skip_malformed:
                        raise ConfigError(f"{where}: {error}; --skip-malformed leaves such rows out") from error
                    malformed.append(f"{where}: {error}")
        dropped = {f"malformed, the first: {malformed[0]}": len(malformed)} if malformed else {}
        line = _report_line("conversations", num_read - len(malformed), num_read, dropped)
        return _rows_in_window(rows, window, [line])

    @classmethod
    def of_episodes(cls, source: EpisodeSource, renderer: TemplateRenderer, vocab_size: int, window: int) -> SftRows:
        """Reads the rows of recorded episodes; raises ConfigError for those of another tokenizer."""
        played = read_played(source.paths)
        chosen = choose_episodes(played, source.min_reward, source.best_per_task)
        rows: list[Demonstration] = []
        for episode in chosen.episodes:
            try:
                rows += episode_rows(renderer, vocab_size, episode)
            except ConfigError as error:
                raise ConfigError(f"the episode of {episode.task.key}, member {episode.member}: {error}") from error
        report = [_report_line("episodes", len(chosen.episodes), len(played), chosen.dropped)]
        report += held_out_lines(chosen.episodes)
        return replace(_rows_in_window(rows, window, report), task=chosen.episodes[0].task)


def rows_of_file(path: str, expectation: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields each row of a file with its location; raises ConfigError for a task, where `expectation` was."""
    for table in open_sources((path,)):
        for where, row in table.rows(table.columns):
            if isinstance(row, Task):
                raise ConfigError(f"{where} is a task, and a {expectation} was wanted")
            yield where, {name: _without_null_keywords(cell) if name == TOOLS else cell for name, cell in row.items()}


def _without_null_keywords(schema: object) -> object:
    """Returns tools without null keywords, which many programs write for absent ones and JSON Schema does not have."""
    if isinstance(schema, Mapping):
        return {
            name: value if name in NULLABLE else _without_null_keywords(value)
            for name, value in schema.items()
            if value is not None or name in NULLABLE
        }
    return [_without_null_keywords(item) for item in schema] if isinstance(schema, list) else schema


def _rows_in_window(rows: Sequence[Demonstration], window: int, report: Sequence[str]) -> SftRows:
    """Returns the rows that fit into the model's context window; raises ConfigError if none is left."""
    fitting = tuple(row for row in rows if len(row.ids) <= window + 1)
    lines = list(report)
    if len(fitting) < len(rows):
        longest = max((len(row.ids) for row in rows), default=0)
        too_long = {
            f"longer than the context window of {window} (the longest has {longest} ids)": len(rows) - len(fitting)
        }
        lines.append(_report_line("rows", len(fitting), len(rows), +Counter(too_long)))
    if not fitting:
        raise ConfigError(f"nothing is left to learn: {'; '.join(lines)}")
    return SftRows(rows=fitting, report=tuple(lines))


def _report_line(what: str, num_kept: int, num: int, dropped: Mapping[str, int]) -> str:
    reasons = [f"{number} {reason}" for reason, number in dropped.items()]
    return f"{num_kept} of {num} {what} are learned" + (f"; left out: {', '.join(reasons)}" if reasons else "")
