"""A cache of pure tools' answers for the process: a call with equal arguments is not run again."""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping

from agentgym.tools.calling.definition import Tool
from agentgym.types import JSON

__all__ = ["KeptAnswers", "answers_of"]

MAX_ANSWERS = 4096
MAX_CHARS = 16 << 20
"""The most characters of all answers of a tool together, with the arguments they belong to."""


class KeptAnswers:
    """The answers of one tool by their arguments' JSON; the least recently used are dropped first.

    >>> kept = KeptAnswers()
    >>> kept.keep({"b": 1, "a": [2]}, "three")
    >>> kept.get({"a": [2], "b": 1}), kept.get({"a": [2], "b": 1.0})
    ('three', None)
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_chars: int = MAX_CHARS) -> None:
        self._max_answers, self._max_chars = max_answers, max_chars
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def get(self, arguments: Mapping[str, JSON]) -> str | None:
        """Returns the answer to these arguments, or None."""
        key = _key(arguments)
        with self._lock:
            if key is None or key not in self._answers:
                return None
            self._answers.move_to_end(key)
            return self._answers[key]

    def keep(self, arguments: Mapping[str, JSON], answer: str) -> None:
        """Keeps an answer, and drops the least recently used ones beyond the limits."""
        key = _key(arguments)
        with self._lock:
            if key is None or key in self._answers:
                return
            self._answers[key] = answer
            self._chars += len(key) + len(answer)
            while len(self._answers) > self._max_answers or self._chars > self._max_chars:
                old, text = self._answers.popitem(last=False)
                self._chars -= len(old) + len(text)


_answers_by_function: weakref.WeakKeyDictionary[object, KeptAnswers] = weakref.WeakKeyDictionary()
_answers_lock = threading.Lock()


def answers_of(tool: Tool) -> KeptAnswers:
    """Returns the answers of the tool's function; for a method that a class marks as a tool, of all its objects."""
    fn = tool.fn if tool.owner is None else getattr(tool.fn, "__func__", tool.fn)
    with _answers_lock:
        return _answers_by_function.setdefault(fn, KeptAnswers())


def _key(arguments: Mapping[str, JSON]) -> str | None:
    """Returns the arguments as JSON, or None if they are nested too deeply to be compared."""
    try:
        return json.dumps(arguments, sort_keys=True)
    except RecursionError:
        return None
