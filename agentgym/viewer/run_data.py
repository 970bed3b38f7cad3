"""The parts of a run folder that a report reads: metrics, one summary per episode, and single episodes on demand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from agentgym.errors import NOT_JSON, RunFolderError
from agentgym.rollout.record.chain import CHAIN
from agentgym.rollout.record.line_reader import FILE_NAME, LineReader, find_episodes
from agentgym.rollout.record.stored_fields import NO_EPISODE
from agentgym.types import JSON

__all__ = ["EpisodeSummary", "EvaluationPoint", "JSONObject", "RunData", "check_run_folder", "read_episode", "read_run"]

_UNREAD = re.compile(rb'"(logprobs|policy_versions|advantages)":\[[-+.0-9eE,\[\]]*\]')
"""The lists of numbers in an episode that no summary needs; inside a string each quote would follow a backslash."""
JSONObject: TypeAlias = Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """A summary of one line of `episodes.jsonl`; `line` counts from 1, `offset` is the line's start in bytes."""

    line: int
    offset: int
    phase: str
    step: int
    group: str
    member: int
    env_id: str
    status: str
    stop_reason: str
    reward: float | None
    success: bool | None
    num_turns: int
    num_tokens: int
    num_sampled_tokens: int
    num_malformed_calls: int

    @property
    def has_failed(self) -> bool:
        """True if the episode has no reward."""
        return self.status not in ("completed", "truncated")


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """The mean over the episodes of one evaluation, failed ones left out: phase, optimizer step, rates."""

    phase: str
    step: int
    success: float
    reward_mean: float
    num_episodes: int


@dataclass(frozen=True, slots=True)
class RunData:
    """A run folder as read: metrics in step order (non-finite numbers are None), episodes in file order."""

    path: Path
    metrics: tuple[JSONObject, ...]
    episodes: tuple[EpisodeSummary, ...]
    at_k: tuple[JSONObject, ...] = ()
    """pass@k, pass^k and best@k as the result of an evaluation has them; empty for a training run."""

    @property
    def episodes_path(self) -> Path:
        """The file that `EpisodeSummary.offset` points into; its plain text if it is compressed."""
        return find_episodes(self.path) or self.path / FILE_NAME

    @property
    def evaluations(self) -> tuple[EvaluationPoint, ...]:
        """One point for each evaluation phase and step, by step."""
        groups: dict[tuple[str, int], list[EpisodeSummary]] = {}
        for episode in self.episodes:
            if episode.phase != "train" and episode.reward is not None:
                groups.setdefault((episode.phase, episode.step), []).append(episode)
        points = [
            EvaluationPoint(
                phase=phase,
                step=step,
                success=sum(bool(episode.success) for episode in members) / len(members),
                reward_mean=math.fsum(episode.reward or 0.0 for episode in members) / len(members),
                num_episodes=len(members),
            )
            for (phase, step), members in groups.items()
        ]
        return tuple(sorted(points, key=lambda point: (point.step, point.phase != "eval_before")))


def check_run_folder(run: Path) -> None:
    """Raises RunFolderError, with what it holds, for a folder that is not that of a run; one may have just begun."""
    if not (run / "config.yaml").is_file():
        _check_contents(run)


def _check_contents(run: Path) -> list[Path]:
    """Returns the files of metrics and episodes, of which one may be absent; raises RunFolderError without both."""
    if not run.is_dir():
        what = "is a file" if run.exists() else "does not exist"
        raise RunFolderError(f"{run} {what}; a run folder was wanted: pass the `--output` of a train or eval run")
    paths = [run / "metrics.jsonl", find_episodes(run) or run / FILE_NAME]
    if not any(path.is_file() and path.stat().st_size for path in paths):
        names = sorted(entry.name for entry in run.iterdir())
        listing = ", ".join(names[:5] + [f"{len(names) - 5} more"] * (len(names) > 5)) or "nothing"
        raise RunFolderError(
            f"{run} holds {listing}; a run folder with episodes.jsonl or metrics.jsonl was wanted: "
            "wait for the run's first step, or pass another folder"
        )
    return paths


def read_run(run: Path) -> RunData:
    """Reads `metrics.jsonl` and `episodes.jsonl`, of which one may be absent; RunFolderError names what is damaged."""
    paths = _check_contents(run)
    metrics = tuple(finite_numbers(record) for _, _, record in _objects(paths[0]))
    episodes = tuple(_summary(paths[1], line, offset, record) for line, offset, record in _objects(paths[1], _UNREAD))
    return RunData(run, metrics, episodes, read_repeat_scores(run / "result.json"))


def read_repeat_scores(path: Path) -> tuple[JSONObject, ...]:
    """Returns the scores of repeated tasks in the result of a finished evaluation."""
    try:
        result: JSON = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return tuple(scores for scores in objects(object_of(result).get("at_k", [])) if objects(scores["k"]))
    except NO_EPISODE as error:
        raise RunFolderError(
            f"{path} is not a result of `agentgym eval` ({error}): delete it to see the episodes alone"
        ) from error


def read_episode(lines: LineReader, summary: EpisodeSummary) -> JSONObject:
    """Reads the whole record of `summary` from the episodes of its run."""
    record: JSON = json.loads(lines.line_at(summary.offset))
    assert isinstance(record, Mapping)
    return record


def _objects(path: Path, unread: re.Pattern[bytes] | None = None) -> Iterator[tuple[int, int, JSONObject]]:
    """Yields line number, byte offset and object of each line; nothing for an absent file.

    The lists that `unread` matches after their names are empty, and an incomplete last line is then left out.
    """
    if not path.is_file():
        return
    offset = 0
    with LineReader(path) as lines:
        for line, raw in enumerate(lines, 1):
            if unread and not raw.endswith(b"\n"):
                return  # an episode that is being written
            try:
                record: JSON = json.loads(unread.sub(rb'"\1":[]', raw) if unread else raw)
            except NOT_JSON as error:
                raise RunFolderError(
                    f"{path}, line {line} is not JSON ({error}); one whole JSON object a line was wanted: the run is "
                    "still writing (try again when it ends) or was cut short (delete that line, or resume the run)"
                ) from error
            if not isinstance(record, Mapping):
                raise RunFolderError(f"{path}, line {line} is a JSON {type(record).__name__}; an object was wanted")
            yield line, offset, record
            offset += len(raw)


def finite_numbers(record: JSONObject) -> JSONObject:
    """Returns a line of metrics with None for numbers that are not finite, without its digest."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
        if key != CHAIN
    }


def _summary(path: Path, line: int, offset: int, record: JSONObject) -> EpisodeSummary:
    try:
        return _read_summary(line, offset, record)
    except NO_EPISODE as error:
        raise no_episode(path, line, error) from error


def no_episode(path: Path, line: int, error: Exception) -> RunFolderError:
    """Returns the error for a line that is JSON but not an episode."""
    return RunFolderError(
        f"{path}, line {line} is not an episode ({type(error).__name__}: {error}); a line as `agentgym train` and "
        "`agentgym eval` write it was wanted: `agentgym verify` names what is wrong with the file"
    )


def _read_summary(line: int, offset: int, record: JSONObject) -> EpisodeSummary:
    turns = objects(record["turns"])
    messages = [object_of(turn["message"]) for turn in turns]
    spans = [span for row in objects(record["rows"]) for span in objects(row["spans"])]
    lengths = [(span["source"], length(span["ids"])) for span in spans]
    counted = {} if spans else object_of(record["metrics"])  # a chat endpoint's counts, where no ids are held
    num_replied = _count(counted.get("completion_tokens"))
    reward, success, step, member = record["reward"], record["success"], record["step"], record["member"]
    if not isinstance(step, int) or not isinstance(member, int):
        raise TypeError("step and member are integers")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise TypeError("reward is a finite number or null")
    return EpisodeSummary(
        line=line,
        offset=offset,
        phase=str(record["phase"]),
        step=step,
        group=str(record["group"]),
        member=member,
        env_id=str(object_of(record["task"])["env_id"]),
        status=str(record["status"]),
        stop_reason=str(record["stop_reason"]),
        reward=None if reward is None else float(reward),
        success=None if success is None else bool(success),
        num_turns=len(turns),
        num_tokens=sum(length for _, length in lengths) + _count(counted.get("prompt_tokens")) + num_replied,
        num_sampled_tokens=sum(length for source, length in lengths if source == "policy") + num_replied,
        num_malformed_calls=sum("raw" in call for message in messages for call in objects(message["tool_calls"])),
    )


def objects(value: JSON) -> list[JSONObject]:
    """Returns `value` as a list of JSON objects; raises TypeError when it is something else."""
    if not isinstance(value, list):
        raise TypeError(f"a list was wanted, got {type(value).__name__}")
    return [object_of(item) for item in value]


def object_of(value: JSON) -> JSONObject:
    """Returns `value` if it is an object of parsed JSON; raises TypeError when it is something else."""
    if not isinstance(value, dict):  # what JSON is read as; a check of Mapping takes ten times as long
        raise TypeError(f"an object was wanted, got {type(value).__name__}")
    return value


def _count(value: JSON) -> int:
    return int(value) if isinstance(value, int | float) else 0


def length(value: JSON) -> int:
    """Returns the length of a list; raises TypeError when it is something else."""
    if not isinstance(value, Sequence):
        raise TypeError(f"a list was wanted, got {type(value).__name__}")
    return len(value)
