"""`RunView`: what the viewer's page is sent of one run, as JSON."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agentgym.errors import NOT_JSON, AgentGymError, ConfigError, RunFolderError
from agentgym.rollout.record.folder_lock import LOCK_NAME
from agentgym.rollout.record.line_reader import LineReader, find_episodes
from agentgym.rollout.record.stored_fields import NO_EPISODE
from agentgym.types import JSON
from agentgym.viewer.index.causes import failure_groups
from agentgym.viewer.index.filters import EpisodeFilter, count_values, filter_from_json, find_rows, metric_names
from agentgym.viewer.index.run_index import RunIndex
from agentgym.viewer.metric_curves import EVALUATED, collapse_signs, metric_curves
from agentgym.viewer.run_data import JSONObject, finite_numbers, objects, read_repeat_scores
from agentgym.viewer.served.episode_view import episode_view, readable
from agentgym.viewer.served.evaluations import Evaluation, last_played, read_evaluations
from agentgym.viewer.served.run_settings import run_settings
from agentgym.viewer.token_text import TokenTexts

__all__ = ["RunView"]

METRICS = "metrics.jsonl"
LIVE_S = 900.0
"""The seconds after its last write in which a run that is locked counts as one that goes on."""
MAX_ROWS = 500
MAX_RELATED = 64
MAX_GROUPS = 200
MAX_METRIC_BYTES = 1 << 28
HIDDEN_COLUMNS = ("offset", "metrics", "task_env")


class RunView:
    """A run folder, its index, and what its page shows; methods may be called from several threads."""

    def __init__(self, path: Path, open_texts: Callable[[Path], TokenTexts], cache: Path | None = None) -> None:
        self.path = path
        self.name = path.resolve().name
        self.index = RunIndex(path, cache)
        self._open_texts = open_texts
        self._lock = threading.Lock()
        self._metrics: list[JSONObject] = []
        self._metrics_end = 0
        self._metrics_fault = ""
        self._evaluations: tuple[str, list[Evaluation]] = ("", [])

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of the run's tokens; its tokenizer is opened when they are first asked for."""
        try:
            return self._open_texts(self.path)
        except AgentGymError as error:
            return TokenTexts(reason=readable(str(error)))

    def state(self) -> dict[str, JSON]:
        """Returns how much of the run is indexed, and a version that changes with what the page shows."""
        state = self.index.state()
        times = [_modification_time(path) for path in (find_episodes(self.path), self.path / METRICS) if path]
        return {
            "name": readable(self.name),
            "path": readable(str(self.path)),
            "num_episodes": state.lines - state.faults,
            "num_bytes": state.size,
            "num_indexed_bytes": min(state.position, state.size),
            "fault": readable(f"{state.faults} lines are left out: {state.fault}") if state.faults else "",
            "is_live": (self.path / LOCK_NAME).exists() and time.time() - max(times) < LIVE_S,
            "version": f"{state.position}-{_size(self.path / METRICS)}",
        }

    def overview(self, _: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns curves, evaluations, symptoms, and the failures of the last evaluation in groups."""
        evaluations = self.evaluations()
        played = last_played(self.index)
        metrics = self._read_metrics()
        return {
            "curves": metric_curves(metrics, EVALUATED if evaluations else ()),
            "signs": [{**sign, "text": readable(str(sign["text"]))} for sign in objects(collapse_signs(metrics))],
            "evaluations": [evaluation.to_json() for evaluation in evaluations],
            "at_k": self._at_k(),
            "last": None if played is None else self._last_failures(*played),
            "fault": readable(self._metrics_fault),
        }

    def _last_failures(self, phase: str, step: int) -> dict[str, JSON]:
        condition = EpisodeFilter(phase=phase, first_step=step, last_step=step)
        num_episodes = find_rows(self.index, condition, offset=0, limit=0)[0]
        num_failed = find_rows(self.index, replace(condition, failed=True), offset=0, limit=0)[0]
        return {"phase": phase, "step": step, "num_episodes": num_episodes, "num_failed": num_failed}

    def evaluations(self) -> list[Evaluation]:
        """Returns the evaluations of the run, read again when it has grown."""
        version = str(self.index.state().position)
        if self._evaluations[0] != version:
            self._evaluations = version, read_evaluations(self.index)
        return self._evaluations[1]

    def failures(self, request: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns the groups of the failures that a filter fits."""
        condition = filter_from_json(_object(request, "filter"))
        groups = failure_groups(self.index, condition, str(request.get("by") or "observation"))
        return {
            "groups": [{**asdict(group), "text": readable(group.text)} for group in groups[:MAX_GROUPS]],
            "num_groups": len(groups),
        }

    def values(self, _: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns what episodes can be filtered by: the number of each value, and the metrics."""
        return {**count_values(self.index), "metrics": list(metric_names(self.index))}

    def episodes(self, request: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns the rows of the table from `offset` on, and the number of all that the filter fits."""
        condition = filter_from_json(_object(request, "filter"))
        sort, descending = str(request.get("sort") or "line"), bool(request.get("descending"))
        offset, limit = (_whole_number(request, name) for name in ("offset", "limit"))
        number, rows = find_rows(self.index, condition, sort, descending, offset=offset, limit=min(limit, MAX_ROWS))
        return {"number": number, "rows": [_page_row(row) for row in rows]}

    def episode(self, request: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns one episode, its row of the table, and what the members of its group got."""
        row = self._row(_whole_number(request, "line"))
        path = find_episodes(self.path)
        if path is None:
            raise RunFolderError(f"{str(self.path)!r} holds no episodes any more")
        try:
            with LineReader(path) as lines:
                line = lines.line_at(_integer(row["offset"]))
            view = episode_view(line, self.texts)
        except NO_EPISODE as error:
            raise RunFolderError(f"episode {row['line']} cannot be shown: {readable(str(error))[:300]}") from error
        members = self._related_rows(row, "group")
        return {"row": _page_row(row), **view, "group": [_page_row(member) for member in members]}

    def related_episodes(self, request: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns the episodes of the same group, or those of the same task in the order of the run."""
        kind = request.get("kind")
        if kind not in ("group", "task"):
            raise ConfigError(f"episodes are related by group or task, got {kind!r:.80}")
        rows = self._related_rows(self._row(_whole_number(request, "line")), kind)
        return {"rows": [_page_row(row) for row in rows[:MAX_RELATED]], "number": len(rows)}

    def settings(self, _: Mapping[str, Any]) -> dict[str, JSON]:
        """Returns settings, command and versions of the run."""
        return run_settings(self.path)

    def _related_rows(self, row: Mapping[str, JSON], kind: str) -> list[dict[str, JSON]]:
        if kind == "group":
            names: tuple[str, ...] = ("phase", "step", "grp")
        else:
            names = ("task_env", "task_digest") if row["task_digest"] is not None else ("task",)
            (number,) = self.index.query("SELECT count(DISTINCT task_digest) FROM episodes")[0]
            names = names if number > 1 else ("task",)
        where = " AND ".join(f"{name} = ?" for name in names)
        lines = self.index.query(
            f"SELECT line FROM episodes WHERE {where} ORDER BY step, line", [row[name] for name in names]
        )
        return [self._row(line) for (line,) in lines[: 4 * MAX_RELATED]]

    def _row(self, line: int) -> dict[str, JSON]:
        rows = find_rows(self.index, EpisodeFilter(line=line), offset=0, limit=1)[1]
        if not rows:
            raise ConfigError(f"there is no episode {line}")
        return rows[0]

    def _read_metrics(self) -> list[JSONObject]:
        """Reads the lines that were appended; one that is no object ends what is read."""
        path = self.path / METRICS
        with self._lock:
            if _size(path) < self._metrics_end:
                self._metrics, self._metrics_end = [], 0
            if not path.is_file() or _size(path) > MAX_METRIC_BYTES:
                return self._metrics
            with open(path, "rb") as file:
                file.seek(self._metrics_end)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._metrics_end += len(line)
                    try:
                        self._metrics.append(finite_numbers(json.loads(line)))
                    except (*NOT_JSON, AttributeError) as error:
                        self._metrics_fault = f"a line of {METRICS} is not JSON: {error}"[:300]
            return self._metrics

    def _at_k(self) -> list[JSON]:
        try:
            return list(read_repeat_scores(self.path / "result.json"))
        except RunFolderError:
            return []


def _page_row(row: Mapping[str, JSON]) -> dict[str, JSON]:
    return {
        name: readable(value) if isinstance(value, str) else value
        for name, value in row.items()
        if name not in HIDDEN_COLUMNS
    }


def _object(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = request.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is an object")
    return value


def _whole_number(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ConfigError(f"{name} is a whole number, got {value!r:.80}")
    return value


def _integer(value: JSON) -> int:
    assert isinstance(value, int)
    return value


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _modification_time(path: Path) -> float:
    return os.stat(path).st_mtime if path.is_file() else 0.0
