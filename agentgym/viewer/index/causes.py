"""Groups of failures: by the last observation, the error of the last failed call, or the stop reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from agentgym.errors import ConfigError
from agentgym.types import JSON
from agentgym.viewer.index.filters import GAP, EpisodeFilter
from agentgym.viewer.index.run_index import RunIndex

__all__ = ["FailureGroup", "failure_groups", "merge_texts"]

WAYS = ("observation", "error", "stop")
MAX_DISTINCT = 2_000
MIN_SHARE = 0.5
"""The share of two texts' words that are the same at their beginnings and ends if they are of one group."""


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Episodes that failed in one way: the text of it, their number, the first of them, and what filters them."""

    text: str
    stop: str
    number: int
    line: int
    filter: dict[str, JSON]


def failure_groups(index: RunIndex, condition: EpisodeFilter, by: str = "observation") -> list[FailureGroup]:
    """Returns the groups of the failed episodes that the filter fits, the largest first.

    Raises ConfigError if `by` is none of WAYS.
    """
    if by not in WAYS:
        raise ConfigError(f"failures are grouped by {', '.join(WAYS)}, got {by!r:.80}")
    where, values = replace(condition, failed=True).to_sql()
    if by == "error":
        sql = f"SELECT tool_error, count(*), min(line) FROM episodes WHERE {where} GROUP BY 1 ORDER BY 2 DESC, 3"
        return [
            FailureGroup(error or "no failed call", "", number, line, {"last_error": error})
            for error, number, line in index.query(sql, values)
        ]
    if by == "stop":
        sql = f"SELECT stop, count(*), min(line) FROM episodes WHERE {where} GROUP BY 1 ORDER BY 2 DESC, 3"
        return [FailureGroup(stop, stop, n, line, {"stop": stop}) for stop, n, line in index.query(sql, values)]
    sql = (
        f"SELECT stop, cause, count(*), min(line) FROM episodes WHERE {where} GROUP BY 1, 2 ORDER BY 3 DESC, 4 LIMIT ?"
    )
    rows = index.query(sql, [*values, MAX_DISTINCT])
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    templates = {stop: merge_texts(cause for each, cause, *_ in rows if each == stop) for stop, *_ in rows}
    for stop, cause, number, line in rows:
        key = stop, templates[stop][cause]
        before, first = groups.get(key, (0, line))
        groups[key] = before + number, min(first, line)
    return [
        FailureGroup(text or "no text", stop, number, line, {"stop": stop, "cause": text})
        for (stop, text), (number, line) in sorted(groups.items(), key=lambda item: (-item[1][0], item[1][1]))
    ]


def merge_texts(texts: Iterable[str]) -> dict[str, str]:
    """Returns the group of each text: those that differ in one stretch of words share a text with a gap.

    >>> merge_texts(["The pearl is cursed.", "The red key is cursed.", "Taken."])["The pearl is cursed."]
    'The … is cursed.'
    """
    shared: dict[str, str] = {}
    groups: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        words = text.split()
        group = next((each for each in groups if len(words) > 1 and _overlap(each.split(), words) >= MIN_SHARE), None)
        members = [text] if group is None else [*groups.pop(group), text]
        groups[text if group is None else _merge(group.split(), words)] += members
    for group, members in groups.items():
        shared |= dict.fromkeys(members, group)
    return shared


def _overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Returns the share of words that both begin and end with; a gap is no word."""
    begin, end = _shared_ends(first, second)
    return (begin + end) / max(len(first) - (GAP in first), len(second), 1)


def _merge(first: Sequence[str], second: Sequence[str]) -> str:
    if list(first) == list(second):
        return " ".join(first)
    begin, end = _shared_ends(first, second)
    return " ".join([*first[:begin], GAP, *(first[-end:] if end else ())])


def _shared_ends(first: Sequence[str], second: Sequence[str]) -> tuple[int, int]:
    """Returns the number of equal words at the beginnings, and at the ends."""
    shorter = min(len(first), len(second))
    begin = 0
    while begin < shorter and first[begin] == second[begin] and first[begin] != GAP:
        begin += 1
    end = 0
    while end < shorter - begin and first[-1 - end] == second[-1 - end] and first[-1 - end] != GAP:
        end += 1
    return begin, end
