"""Holds out tasks by their content, not by their seed: a task's digest decides its side of the split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.errors import EnvironmentFault
from agentgym.types import JSON, Message, ToolSpec

__all__ = ["ONE_IN", "TaskDraw", "digest_of", "is_held_out", "prompt_identity"]

ONE_IN = 4
"""One task in this many is held out. Training draws 1.33 tasks for each that it plays, an evaluation 4."""
MAX_DRAWS = 64
"""The most draws of one reset. If a quarter of the tasks is on the wanted side, all miss it once in 10^8 resets."""
SAME_DRAWS = 3
"""The number of successive equal digests after which a reset stops drawing: the tasks cannot be distinguished."""


def prompt_identity(system: str, messages: object, tools: Sequence[ToolSpec]) -> JSON:
    """The default identity of a task: all that the model is shown before its first reply."""
    opening = messages if isinstance(messages, tuple | list) else ()
    texts: list[JSON] = [[message.role, str(message.content)] for message in opening if isinstance(message, Message)]
    return [system, texts, [tool.to_openai() for tool in tools]]


def digest_of(identity: JSON, options: Mapping[str, Any]) -> str:
    """The digest of a task from its identity and its reset options; equal for equal tasks, in every process.

    Raises EnvironmentFault for an identity that is not JSON.

    >>> digest_of(["crane"], {})
    '3b4f95e789c4f2e4'
    """
    try:
        parts = [json.dumps(identity, sort_keys=True)]
    except TypeError as error:
        raise EnvironmentFault(
            f"task_identity() returns JSON (numbers, texts, lists, dicts), so that equal tasks are found: {error}"
        ) from error
    if options:
        parts.append(json.dumps(dict(options), sort_keys=True, default=lambda value: type(value).__name__))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_held_out(digest: str) -> bool:
    """True if a task of this digest is for evaluation, False if it is for training."""
    return int(digest, 16) % ONE_IN == 0


class TaskDraw:
    """The draws of one reset, which go on until a task is on the side of the seed.

    A seed from EVAL_SEED_START on asks for a held-out task, any other for one of training; a reset without a seed asks
    for the side of the reset before. The first draw is that of the seed itself, so most training tasks are what the
    seed alone would give. Further ones follow from the seed too. If no draw is on the side, the first one is
    taken, and `has_failed` is true.
    """

    def __init__(self, seed: int | None, wants_held_out: bool) -> None:
        self.seed = seed
        """The seed of the next draw; None continues the random stream."""
        self.wants_held_out = wants_held_out if seed is None else seed >= EVAL_SEED_START
        self.has_failed = False
        self._first = seed
        self._digests: list[str] = []

    def settles(self, digest: str) -> bool:
        """True if the task that was drawn is taken; else `seed` is that of the next draw."""
        if self.has_failed or is_held_out(digest) == self.wants_held_out:
            return True
        self._digests.append(digest)
        is_stuck = len(self._digests) >= SAME_DRAWS and len(set(self._digests[-SAME_DRAWS:])) == 1
        if is_stuck or len(self._digests) >= MAX_DRAWS:
            self.has_failed, self.seed = True, self._first
            return self._first is None
        if self._first is not None:
            start = EVAL_SEED_START if self.wants_held_out else 0
            self.seed = start + _derive_number(self._first, len(self._digests)) % EVAL_SEED_START
        return False


def _derive_number(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8], "big")
