"""Digests that name a row, a prompt and a set of tasks by what they hold, wherever they stand."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from agentgym.types import JSON, Task

__all__ = ["SEED_RANGE", "data_digest", "prompt_digest", "row_seed", "task_digest"]

SEED_RANGE = 1_000_000_000
"""Seeds of rows are below it: training's half of the seeds, whose other half numbers an environment's own tasks."""


def row_seed(env_id: str, options: Mapping[str, JSON]) -> int:
    """The seed of a row: the same for equal rows, whichever file has them, in whatever order."""
    return int(_digest([env_id, _without_nulls(options)])[:16], 16) % SEED_RANGE


def task_digest(task: Task) -> str:
    """Names a task by all that it is made of."""
    return _digest([task.env_id, task.seed, _without_nulls(task.options), _without_nulls(task.kwargs)])


def data_digest(tasks: Sequence[Task], *, ordered: bool) -> str:
    """Names a set of tasks, and their order where it is `ordered`."""
    digests = [task_digest(task) for task in tasks]
    return _digest(digests if ordered else sorted(digests))


def prompt_digest(task: Task) -> str:
    """Names what a task asks: equal for prompts that differ in letter case, width, spaces or the system prompt alone.

    A task without messages is named by all that it is made of.
    """
    messages = task.options.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return task_digest(task)
    said = [one for one in messages if isinstance(one, Mapping) and one.get("role") not in ("system", "developer")]
    told = said or [one for one in messages if isinstance(one, Mapping)]
    return _digest([[str(one.get("role")), _normalized(_text(one.get("content")))] for one in told])


def _text(content: JSON) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _normalized(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _without_nulls(value: JSON) -> JSON:
    """Parquet gives every row all keys of a mapping, as null where a row has none; that makes no other row."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nulls(one) for one in value]
    return value


def _digest(value: JSON | Iterable[JSON]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("ascii")).hexdigest()
