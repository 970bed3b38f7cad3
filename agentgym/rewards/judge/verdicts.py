"""Reads a judge's verdict; what is not a verdict raises RewardFailure, and is never a low score."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from agentgym.errors import NOT_JSON
from agentgym.rewards.reward import RewardFailure

__all__ = ["SCORE", "read_ranking", "read_score", "read_scores"]

_NUMBER = r"(-?\d+(?:\.\d+)?)(?:\s*/\s*(?P<highest>\d+(?:\.\d+)?))?"
SCORE = rf"(?i)\**score:\**\s*{_NUMBER}\**\.?"
"""The last line of a verdict: `Score: 7`, or `Score: 7/10` if 10 is the highest score."""
LINE = re.compile(rf"(?:[-*+]\s+|\d+[.)]\s+)?\**(?P<name>[^:*]+?)\**\s*:\**\s*{_NUMBER}\**\.?")
RANKING = re.compile(r"(?i)\**ranking:\**\s*(\d+(?:\s*[>=]\s*\d+)*)\**\.?")
MAX_SHOWN = 200


def read_score(verdict: str, pattern: re.Pattern[str], low: float, high: float) -> float:
    """Returns the score of the verdict's last line, which the pattern matches as a whole."""
    last = _last_lines(verdict, 1)
    match = pattern.fullmatch(last[0]) if last else None
    score = math.nan if match is None else _number(match, high)
    if not low <= score <= high:
        raise RewardFailure(f"the judge's verdict ends with no score from {low:g} to {high:g}: {_end(verdict)}")
    return score


def read_scores(verdict: str, names: Sequence[str], low: float, high: float) -> dict[str, float]:
    """Returns the score of each name: one line for each at the verdict's end, or a JSON object there, and no others."""
    pairs = _json_scores(verdict) or _line_scores(verdict, len(names), high)
    names_by_key = {name.casefold(): name for name in names}
    scores = {names_by_key.get(name.casefold(), name): score for name, score in pairs}
    if len(pairs) != len(names) or {*scores} != {*names}:
        form = ", ".join(f"{name}: N" for name in names)
        raise RewardFailure(f"the judge's verdict ends with no score for each of {form:.300}: {_end(verdict)}")
    for name, score in scores.items():
        if not low <= score <= high:
            raise RewardFailure(f"the judge's score of {name!r} is a number from {low:g} to {high:g}: {_end(verdict)}")
    return {name: scores[name] for name in names}


def read_ranking(verdict: str, num_answers: int) -> list[float]:
    """Returns a reward from 0 to 1 for each answer by its number: the share of others it beats, a tie beats half.

    >>> read_ranking("Ranking: 2 > 1 = 3", 3)
    [0.25, 1.0, 0.25]
    """
    last = _last_lines(verdict, 1)
    match = RANKING.fullmatch(last[0]) if last else None
    ranks = [[int(number) for number in rank.split("=")] for rank in match[1].split(">")] if match else []
    if sorted(number for rank in ranks for number in rank) != list(range(1, num_answers + 1)):
        raise RewardFailure(
            f"the judge's verdict ends with no ranking of the answers 1 to {num_answers}, each once: {_end(verdict)}"
        )
    rewards, num_worse = [0.0] * num_answers, num_answers
    for rank in ranks:
        num_worse -= len(rank)
        for number in rank:
            rewards[number - 1] = (num_worse + (len(rank) - 1) / 2) / (num_answers - 1)
    return rewards


def _line_scores(verdict: str, num: int, high: float) -> list[tuple[str, float]]:
    matches = [LINE.fullmatch(line) for line in _last_lines(verdict, num)]
    return [(match["name"].strip(), _number(match, high, group=2)) for match in matches if match is not None]


def _json_scores(verdict: str) -> list[tuple[str, float]]:
    """Returns the entries of the JSON object that the verdict ends with, fenced or not; empty without one."""
    text = verdict.strip().removesuffix("```").rstrip()
    for start in [match.start() for match in re.finditer(r"^\s*\{", text, re.MULTILINE)]:
        try:
            entries = json.loads(text[start:], object_pairs_hook=list)
        except NOT_JSON:
            continue
        return [(name, _json_number(value)) for name, value in entries]
    return []


def _json_number(value: object) -> float:
    """Returns a number, also of `{"score": number}` with other entries; NaN for anything else."""
    if isinstance(value, list):
        value = next((entry[1] for entry in value if isinstance(entry, tuple) and entry[0] == "score"), None)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _number(match: re.Match[str], high: float, group: int = 1) -> float:
    highest = match.groupdict().get("highest")
    try:
        return float(match[group]) if highest is None or float(highest) == high else math.nan
    except (TypeError, ValueError):
        return math.nan


def _last_lines(verdict: str, num: int) -> list[str]:
    return [line.strip() for line in verdict.splitlines() if line.strip()][-num:]


def _end(verdict: str) -> str:
    return repr(verdict.strip()[-MAX_SHOWN:])
