"""Digests that identify a row, a prompt and a set of tasks by their content, wherever they are."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from agentgym.types import JSON, Task

__all__ = ["SEED_RANGE", "data_digest", "prompt_digest", "row_seed", "task_digest", "without_nulls"]

SEED_RANGE = 1_000_000_000
"""The upper bound of seeds of rows: training's half of the seeds; the other half numbers an environment's own tasks."""


def row_seed(env_id: str, options: Mapping[str, JSON]) -> int:
    """Returns the seed of a row: the same for equal rows in any file and any order."""
    return int(_digest([env_id, without_nulls(options)])[:16], 16) % SEED_RANGE


def task_digest(task: Task) -> str:
    """Returns a digest of all parts of a task."""
    return _digest([task.env_id, task.seed, without_nulls(task.options), without_nulls(task.kwargs)])


def data_digest(tasks: Sequence[Task], *, ordered: bool) -> str:
    """Returns a digest of a set of tasks, and also of their order if `ordered`."""
    digests = [task_digest(task) for task in tasks]
    return _digest(digests if ordered else sorted(digests))


def prompt_digest(task: Task) -> str:
    """Returns a digest of a task's prompt that ignores letter case, character width, spaces and the system prompt.

    For a task without messages it is the `task_digest`.
    """
    messages = task.options.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return task_digest(task)
    user_messages = [
        message
        for message in messages
        if isinstance(message, Mapping) and message.get("role") not in ("system", "developer")
    ]
    parts = user_messages or [message for message in messages if isinstance(message, Mapping)]
    return _digest([[str(message.get("role")), _normalize_text(_text(message.get("content")))] for message in parts])


def _text(content: JSON) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _normalize_text(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def without_nulls(value: JSON) -> JSON:
    """Returns the value without nulls: parquet gives every row all keys of a mapping, as null where a row has none."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_nulls(item) for item in value]
    return value


def _digest(value: JSON | Iterable[JSON]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("ascii")).hexdigest()
