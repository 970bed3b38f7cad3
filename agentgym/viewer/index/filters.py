"""`EpisodeFilter`: which episodes of an index are meant, in which order; and the counts of what can be filtered by."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from agentgym.errors import ConfigError, nearest
from agentgym.types import JSON
from agentgym.viewer.index.episode_row import MAX_INTEGER
from agentgym.viewer.index.run_index import COLUMNS, RunIndex

__all__ = [
    "SORT_NAMES",
    "EpisodeFilter",
    "count_values",
    "filter_from_json",
    "find_lines",
    "find_rows",
    "metric_names",
]

ALIASES = {"group": "grp", "length": "tokens", "stop_reason": "stop", "num_turns": "turns", "num_tokens": "tokens"}
"""Further names of columns, for sorting."""
SORT_NAMES = tuple(name for name in COLUMNS if name not in ("offset", "metrics", "task_env", "task_digest", "grp"))
FAILED = "coalesce(episodes.success, 0) = 0"
GAP = "…"
"""The part of a cause that differs between the episodes of a group of failures."""
MAX_WORDS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeFilter:
    """Conditions that an episode meets all of; None or "" for no condition."""

    line: int | None = None
    phase: str = ""
    first_step: int | None = None
    last_step: int | None = None
    env: str = ""
    task: str = ""
    """A part of the task's key."""
    seed: int | None = None
    group: str = ""
    status: str = ""
    stop: str = ""
    tool: str = ""
    """A tool that was called."""
    error: str = ""
    """The kind of error that a call was answered with, such as `unknown_tool`; `any` for any kind."""
    last_error: str | None = None
    """The kind of the last error of a call; "" if no call had one."""
    cause: str | None = None
    """The first line of the last observation, its numbers as `#`; `…` fits any text."""
    failed: bool | None = None
    """True: the episode did not succeed, or has no reward; False: it succeeded."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_turns: int | None = None
    max_turns: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    metric: str = ""
    """The metric that `min_metric` and `max_metric` limit."""
    min_metric: float | None = None
    max_metric: float | None = None
    contains: str = ""
    """Words that observations, replies or calls contain, all of them; words in quotes follow each other."""

    def to_sql(self) -> tuple[str, list[object]]:
        """Returns the condition of a query of `episodes`, and its values."""
        conditions: list[str] = []
        values: list[object] = []

        def add(condition: str, *parameters: object) -> None:
            conditions.append(condition)
            values.extend(parameters)

        for column in ("phase", "env", "status", "stop"):
            if value := getattr(self, column):
                add(f"episodes.{column} = ?", value)
        if self.line is not None:
            add("line = ?", self.line)
        if self.group:
            add("episodes.grp = ?", self.group)
        if self.task:
            add("instr(episodes.task, ?)", self.task)
        if self.seed is not None:
            add("episodes.seed = ?", self.seed if abs(self.seed) < MAX_INTEGER else str(self.seed))
        if self.failed is not None:
            add(FAILED if self.failed else f"NOT ({FAILED})")
        for name, column in (("step", "step"), ("reward", "reward"), ("turns", "turns"), ("tokens", "tokens")):
            low, high = ("first_step", "last_step") if name == "step" else (f"min_{name}", f"max_{name}")
            _add_range(add, f"episodes.{column}", getattr(self, low), getattr(self, high))
        if self.metric:
            path = _metric_path(self.metric)
            add("json_extract(episodes.metrics, ?) IS NOT NULL", path)
            for sign, limit in ((">=", self.min_metric), ("<=", self.max_metric)):
                if limit is not None:
                    add(f"json_extract(episodes.metrics, ?) {sign} ?", path, limit)
        if self.tool:
            add("line IN (SELECT line FROM calls WHERE tool = ?)", self.tool)
        if self.error == "any":
            add("line IN (SELECT line FROM calls WHERE error <> '')")
        elif self.error:
            add("line IN (SELECT line FROM calls WHERE error = ?)", self.error)
        if self.last_error is not None:
            add("episodes.tool_error = ?", self.last_error)
        if self.cause is not None:
            pattern = re.sub(r"([\\%_])", r"\\\1", self.cause).replace(GAP, "%")
            add("episodes.cause LIKE ? ESCAPE '\\'", pattern)
        if match := _match(self.contains):
            add("line IN (SELECT rowid FROM texts WHERE texts MATCH ?)", match)
        elif self.contains.strip():
            add("0")  # it has no word that could be found
        return " AND ".join(conditions) or "1", values


def filter_from_json(value: Mapping[str, Any]) -> EpisodeFilter:
    """Returns the filter of a JSON object; raises ConfigError for another name or type."""
    kinds = {field.name: str(field.type) for field in fields(EpisodeFilter)}
    values: dict[str, Any] = {}
    for name, item in value.items():
        if name not in kinds:
            raise ConfigError(f"unknown filter {name!r}{nearest(name, kinds) or '.'}")
        if item is None or (item == "" and name not in ("cause", "last_error")):
            continue
        kind = kinds[name].partition(" ")[0]
        is_fit = {
            "str": isinstance(item, str),
            "bool": isinstance(item, bool),
            "int": type(item) is int and (abs(item) < MAX_INTEGER or name == "seed"),
            "float": isinstance(item, int | float) and not isinstance(item, bool),
        }[kind]
        if not is_fit:
            raise ConfigError(f"the filter {name!r} takes {kind}, got {item!r:.80}")
        values[name] = item
    return EpisodeFilter(**values)


def find_rows(
    index: RunIndex, condition: EpisodeFilter, sort: str = "line", descending: bool = False, *, offset: int, limit: int
) -> tuple[int, list[dict[str, JSON]]]:
    """Returns the number of the episodes that fit, and those from `offset` on, at most `limit`, by column.

    `sort` is one of SORT_NAMES or a metric. Raises ConfigError for a name that is neither.
    """
    order, order_values = _order(index, sort, descending)
    where, values = condition.to_sql()
    number = index.query(f"SELECT count(*) FROM episodes WHERE {where}", values)[0][0]
    rows = index.query(
        f"SELECT {', '.join(COLUMNS)} FROM episodes WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
        [*values, *order_values, limit, offset],
    )
    return number, [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def find_lines(
    index: RunIndex, condition: EpisodeFilter, sort: str = "line", descending: bool = False, limit: int | None = None
) -> list[tuple[int, int]]:
    """Returns the line and offset of the episodes that fit, in order."""
    order, order_values = _order(index, sort, descending)
    where, values = condition.to_sql()
    sql = f"SELECT line, offset FROM episodes WHERE {where} ORDER BY {order} LIMIT ?"
    return [
        (line, offset) for line, offset in index.query(sql, [*values, *order_values, -1 if limit is None else limit])
    ]


def count_values(index: RunIndex) -> dict[str, list[tuple[str, int]]]:
    """Returns the values that can be filtered by, at most 200 of a kind, with the number of episodes of each."""
    counts: dict[str, list[tuple[str, int]]] = {}
    for column in ("phase", "env", "status", "stop"):
        counts[column] = index.query(f"SELECT {column}, count(*) FROM episodes GROUP BY 1 ORDER BY 1 LIMIT 200")
    for column in ("tool", "error"):
        sql = f"SELECT {column}, count(DISTINCT line) FROM calls WHERE {column} <> '' GROUP BY 1 ORDER BY 1 LIMIT 200"
        counts[column] = index.query(sql)
    return counts


def metric_names(index: RunIndex) -> Sequence[str]:
    """Returns the metrics of the first and last episodes."""
    samples = "SELECT metrics FROM (SELECT metrics FROM episodes ORDER BY line {} LIMIT 50)"
    sql = f"SELECT DISTINCT key FROM ({samples.format('')} UNION ALL {samples.format('DESC')}), json_each(metrics)"
    return sorted(name for (name,) in index.query(sql) if not set('"\\') & set(name))


def _order(index: RunIndex, sort: str, descending: bool) -> tuple[str, list[object]]:
    direction = "DESC" if descending else "ASC"
    column = ALIASES.get(sort, sort)
    if column in SORT_NAMES or column == "grp":
        return f"episodes.{column} {direction}, line", []
    names = metric_names(index)
    if sort not in names:
        listing = ", ".join(dict.fromkeys([*SORT_NAMES, *ALIASES, *names]))
        raise ConfigError(
            f"episodes have no {sort!r:.80} to sort by{nearest(sort, [*SORT_NAMES, *names]) or '.'} Known: {listing}"
        )
    return f"json_extract(metrics, ?) {direction}, line", [_metric_path(sort)]


def _metric_path(name: str) -> str:
    return '$."' + re.sub(r'["\\]', "", name) + '"'


def _add_range(add: Callable[..., None], column: str, low: float | None, high: float | None) -> None:
    if low is not None:
        add(f"{column} >= ?", low)
    if high is not None:
        add(f"{column} <= ?", high)


def _match(text: str) -> str:
    """Returns the words as a query of FTS5: each in quotes, the last one, without a closing quote, as a beginning."""
    parts = re.findall(r'"([^"]+)"?|([^\s"]+)', text.replace("\0", " "))[:MAX_WORDS]
    phrases = [quoted or word for quoted, word in parts if re.search(r"\w", quoted or word)]
    if not phrases:
        return ""
    is_begun = not text.rstrip(" ").endswith('"') and text == text.rstrip()
    return " ".join(f'"{phrase}"' for phrase in phrases) + ("*" if is_begun else "")
