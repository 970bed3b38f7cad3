"""The parts of an episode that the index holds, read from a line without its numbers of each token."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from agentgym.rollout.record.task_names import TaskIdentity
from agentgym.types import JSON, Status, Task
from agentgym.viewer.run_data import JSONObject, length, object_of, objects

__all__ = ["MAX_LINE_BYTES", "EpisodeRow", "episode_row", "is_trainable"]

MAX_LINE_BYTES = 1 << 26
"""The most bytes of a line that is read for the index or the page: what is made of them has several times as many."""
MAX_INTEGER = 2**63
MAX_CAUSE = 160
MAX_TEXT = 1 << 20
"""The most characters of an episode's observations, of its replies and of its calls that are searched."""
_NUMBERS = re.compile(rb'"(logprobs|policy_versions|advantages|ids)":\[[-+.0-9eE,\[\]]*\]')
"""The lists of numbers in an episode; inside a string each quote would follow a backslash."""
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """The parts of an episode that the index holds; `columns` are those of its table, by their names."""

    columns: Mapping[str, object]
    calls: Mapping[tuple[str, str], int]
    """The number of calls by tool and kind of error; malformed ones have the tool ""."""
    texts: tuple[str, str, str]
    """Observations, replies and calls, for the search."""


def episode_row(line: bytes, offset: int) -> EpisodeRow:
    """Returns the row of a line that begins at this offset; raises one of NO_EPISODE if it is not an episode."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it has {len(line):,} bytes, more than {MAX_LINE_BYTES:,}")
    record = object_of(json.loads(_NUMBERS.sub(_count_numbers, line)))
    turns = [_Turn.read(turn) for turn in objects(record["turns"])]
    calls: dict[tuple[str, str], int] = {}
    for turn in turns:
        for call in turn.calls:
            key = turn.name_and_error(call)
            calls[key] = calls.get(key, 0) + 1
    step, member, reward = record["step"], record["member"], record["reward"]
    if not isinstance(step, int) or not isinstance(member, int) or max(abs(step), abs(member)) >= MAX_INTEGER:
        raise TypeError("step and member are integers of at most 63 bits")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise TypeError("reward is a finite number or null")
    task = Task(**object_of(record["task"]))  # type: ignore[arg-type]
    identity = TaskIdentity.of_task(task, object_of(record["info"]).get("task_digest"))
    success = record["success"]
    columns = {
        "offset": offset,
        "phase": _plain(str(record["phase"])),
        "step": step,
        "grp": _plain(str(record["group"])),
        "member": member,
        "env": _plain(task.env_id),
        "seed": task.seed if abs(task.seed) < MAX_INTEGER else str(task.seed),
        "task": _plain(identity.key),
        "task_env": _plain(identity.env),
        "task_digest": None if identity.digest is None else _plain(identity.digest),
        "status": _plain(str(record["status"])),
        "stop": _plain(str(record["stop_reason"])),
        "reward": None if reward is None else float(reward),
        "success": None if success is None else bool(success),
        "turns": len(turns),
        **_token_counts(record),
        "malformed": sum("raw" in call for turn in turns for call in turn.calls),
        "tool_error": next(reversed([kind for _, kind in calls if kind]), ""),
        "cause": _cause(record, turns),
        "metrics": json.dumps(object_of(record["metrics"]), allow_nan=False),
    }
    return EpisodeRow(columns, calls, _texts(turns))


def is_trainable(status: object) -> bool:
    """Returns True for the status of an episode that has a reward."""
    return status in (Status.COMPLETED, Status.TRUNCATED)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The parts of a turn that the row is made of."""

    message: JSONObject
    calls: list[JSONObject]
    results: list[JSONObject]
    observation: str

    @classmethod
    def read(cls, turn: JSONObject) -> _Turn:
        message = object_of(turn["message"])
        return cls(message, objects(message["tool_calls"]), objects(turn["tool_results"]), str(turn["observation"]))

    def name_and_error(self, call: JSONObject) -> tuple[str, str]:
        """Returns the tool of a call, "" of a malformed one, and the kind of its error, "" without one."""
        kind = next((result["error"] for result in self.results if result["call_id"] == call["id"]), None)
        if "raw" in call:
            return "", _plain(str(kind or "malformed"))
        return _plain(str(call["name"])), _plain(str(kind or ""))


def _count_numbers(match: re.Match[bytes]) -> bytes:
    if match[1] != b"ids":
        return b'"%b":[]' % match[1]
    return b'"ids":%d' % (match[0].count(b",") + 1 if match[0] != b'"ids":[]' else 0)


def _token_counts(record: JSONObject) -> dict[str, int]:
    spans = [span for row in objects(record["rows"]) for span in objects(row["spans"])]
    if not spans:  # a chat endpoint's counts, where no ids are held
        counts = object_of(record["metrics"])
        num_read, num_replied = (int(_number(counts.get(f"{name}_tokens"))) for name in ("prompt", "completion"))
        return {"tokens": num_read + num_replied, "sampled": num_replied}
    lengths = [(span["source"], n if isinstance(n := span["ids"], int) else length(n)) for span in spans]
    return {
        "tokens": sum(num_ids for _, num_ids in lengths),
        "sampled": sum(num_ids for source, num_ids in lengths if source == "policy"),
    }


def _cause(record: JSONObject, turns: list[_Turn]) -> str:
    """Returns the first line of the error or the last observation that has a text, with its numbers left out."""
    answers = (turn.observation.strip() for turn in reversed(turns))
    text = str(record["error"] or "").strip() or next(filter(None, answers), "")
    first = text.partition("\n")[0][: 2 * MAX_CAUSE]
    return _plain(_DIGITS.sub("#", first)[:MAX_CAUSE].strip())


def _texts(turns: list[_Turn]) -> tuple[str, str, str]:
    observations: list[str] = []
    replies: list[str] = []
    calls: list[str] = []
    for turn in turns:
        observations.append(turn.observation)
        observations += [text for each in turn.results if (text := str(each["content"])) != turn.observation]
        replies += [text for text in (turn.message["content"], turn.message["reasoning"]) if isinstance(text, str)]
        for call in turn.calls:
            _add_words(call["raw"] if "raw" in call else [call["name"], call["arguments"]], calls)
    parts = ("\n".join(texts)[:MAX_TEXT] for texts in (observations, replies, calls))
    first, second, third = map(_plain, parts)
    return first, second, third


def _plain(text: str) -> str:
    """Returns the text with `?` for lone surrogates, which UTF-8 and so the database cannot hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _add_words(value: JSON, words: list[str]) -> None:
    """Adds the names and values in a call's arguments to `words`."""
    if isinstance(value, str):
        words.append(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            words.append(name)
            _add_words(item, words)
    elif isinstance(value, list):
        for item in value:
            _add_words(item, words)
    elif value is not None:
        words.append(str(value))


def _number(value: JSON) -> float:
    return value if isinstance(value, int | float) else 0
