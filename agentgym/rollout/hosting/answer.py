"""The environment's return values, checked on arrival: an author's mistake is named and never reaches the record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from agentgym.errors import EnvironmentFault
from agentgym.trajectory import MAX_REWARD, is_reward
from agentgym.types import JSON, Message, ToolResult

__all__ = ["EnvStep", "plain_answers", "read_reset", "read_step"]

_CONVERSATION_KEYS = frozenset({"messages", "history", "tool_results", "metrics", "chat_endpoint"})


@dataclass(frozen=True, slots=True)
class EnvStep:
    """The environment's answer to a reply, or of its reset (reward 0.0, both flags False)."""

    observation: str
    messages: tuple[Message, ...]
    """The messages for the model; `(Message("user", observation),)` unless the environment gives others."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    tool_results: tuple[ToolResult, ...] = ()
    info: Mapping[object, object] = field(default_factory=dict)
    history: tuple[Message, ...] | None = None
    """The environment's replacement for the whole conversation (`info["history"]`), `messages` included."""

    def preceded_by(self, note: str) -> EnvStep:
        """Returns the same answer after a sentence that informs the model what was wrong with its reply."""
        first, rest = (self.messages[0], self.messages[1:]) if self.messages else (Message("user", ""), ())
        if first.role != "user":
            first, rest = Message("user", ""), self.messages
        message = Message("user", f"{note}\n{first.content}".rstrip("\n"))
        history = self.history
        if history is not None and history[-1].role == "user":
            history = (*history[:-1], Message("user", f"{note}\n{history[-1].content}"))
        elif history is not None:
            history = (*history, Message("user", note))
        return replace(self, observation=f"{note}\n{self.observation}", messages=(message, *rest), history=history)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of `info["metrics"]`; raises EnvironmentFault for values that are not finite numbers."""
        metrics = self.info.get("metrics", {})
        if not isinstance(metrics, Mapping):
            raise EnvironmentFault(f'info["metrics"] is a dict of numbers, got {type(metrics).__name__}')
        return {str(name): _finite(value, f'info["metrics"][{name!r}]') for name, value in metrics.items()}

    def extras(self) -> dict[str, JSON]:
        """Returns the other entries of `info` that JSON can hold, for people who inspect the episode."""
        extras: dict[str, JSON] = {}
        for name, value in self.info.items():
            if isinstance(name, str) and name not in _CONVERSATION_KEYS and _is_json(value):
                extras[name] = value  # type: ignore[assignment]  # narrowed by _is_json
        return extras

    def plain(self) -> EnvStep:
        """Returns the same answer with what `metrics` and `extras` read of its info, in Python's own types."""
        info: dict[object, object] = json.loads(json.dumps(self.extras(), default=_as_builtin))
        if "metrics" in self.info:
            metrics = self.info["metrics"]
            info["metrics"] = dict(metrics) if isinstance(metrics, Mapping) else metrics
        return replace(self, info=info)


def plain_answers(observation: str, results: Sequence[ToolResult]) -> Iterator[tuple[Message, ...]]:
    """Yields the usual messages of an answer with an observation and results: the results, then both, or the text."""
    tools = tuple(
        Message("tool", result.content, tool_call_id=result.call_id, name=result.name or None) for result in results
    )
    if tools:
        yield tools
        yield (*tools, Message("user", observation))
    yield (Message("user", observation),)


def read_reset(values: object) -> EnvStep:
    """Returns the checked answer of `reset`; raises EnvironmentFault if it is not `(str, dict)`."""
    if not isinstance(values, tuple) or len(values) != 2:
        raise EnvironmentFault(f"reset() returns (observation, info), got {_shape(values)}")
    observation, messages, results, info = _read(values[0], values[1])
    return EnvStep(observation, messages, tool_results=results, info=info)


def read_step(values: object) -> EnvStep:
    """Returns the checked answer of `step`; raises EnvironmentFault if it is not the five values of Gymnasium."""
    if not isinstance(values, tuple) or len(values) != 5:
        raise EnvironmentFault(
            f"step() returns (observation, reward, terminated, truncated, info), got {_shape(values)}"
        )
    observation, messages, results, info = _read(values[0], values[4])
    reward = _finite(values[1], "the reward")
    history = _history(info.get("history"))
    return EnvStep(observation, messages, reward, bool(values[2]), bool(values[3]), results, info, history)


def _history(value: object) -> tuple[Message, ...] | None:
    if value is None:
        return None
    if not _all_are(value, Message) or not value:
        raise EnvironmentFault('info["history"] is a tuple of Message, with at least one')
    history: tuple[Message, ...] = tuple(cast("Sequence[Message]", value))
    if history[-1].role == "assistant":
        raise EnvironmentFault('info["history"] ends with what the model is to answer, not with its own message')
    return history


def _read(
    observation: object, info: object
) -> tuple[str, tuple[Message, ...], tuple[ToolResult, ...], Mapping[object, object]]:
    if not isinstance(observation, str):
        raise EnvironmentFault(f"an observation is a str, got {type(observation).__name__}")
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info is a dict, got {type(info).__name__}")
    messages = info.get("messages")
    if messages is None:
        messages = (Message("user", observation),)
    elif not _all_are(messages, Message):
        raise EnvironmentFault('info["messages"] is a tuple of Message')
    results = info.get("tool_results", ())
    if not _all_are(results, ToolResult):
        raise EnvironmentFault('info["tool_results"] is a tuple of ToolResult')
    return observation, tuple(messages), tuple(results), info


def _all_are(values: object, kind: type) -> bool:
    return isinstance(values, (tuple, list)) and all(isinstance(value, kind) for value in values)


def _finite(value: object, what: str) -> float:
    if not is_reward(value):
        raise EnvironmentFault(f"{what} is a finite number, at most {MAX_REWARD:g}; got {value!r:.80}")
    return float(cast("float", value))


def _is_json(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if value is None or isinstance(value, (str, int)):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_json(entry) for name, entry in value.items())
    return isinstance(value, Sequence) and not isinstance(value, bytes) and all(map(_is_json, value))


def _as_builtin(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else list(cast("Sequence[object]", value))


def _shape(values: object) -> str:
    return f"a tuple of {len(values)}" if isinstance(values, tuple) else type(values).__name__
