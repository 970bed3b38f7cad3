"""The types of a conversation: messages, tool calls, tool specifications, results, tasks, how an episode ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from agentgym.errors import ConfigError

__all__ = [
    "JSON",
    "AnyCall",
    "MalformedCall",
    "Message",
    "Role",
    "Status",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
]

JSON: TypeAlias = "None | bool | int | float | str | Sequence[JSON] | Mapping[str, JSON]"
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call of a tool by the model: `ToolCall("call_0", "go", {"direction": "north"})`."""

    id: str
    name: str
    arguments: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that was meant as a call and cannot be parsed as one; kept raw, and answered with `error`."""

    id: str
    raw: str
    error: str
    truncated: bool = False
    """True if the reply ended in it: it might have been a call, had the reply gone on."""


AnyCall: TypeAlias = "ToolCall | MalformedCall"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `reasoning` is the text inside the model's thinking marks, `tool_calls` are in the order the model wrote
    them, `tool_call_id` names the call that a `tool` message answers, and `name` the tool that was called.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[AnyCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"message role {self.role!r} is not one of {', '.join(ROLES)}")
        if self.tool_calls and self.role != "assistant":
            raise ConfigError(f"a {self.role} message cannot hold tool calls; only an assistant message can")
        if self.tool_call_id is not None and self.role != "tool":
            raise ConfigError(f"a {self.role} message cannot answer a tool call; only a tool message can")
        if self.name is not None and self.role != "tool":
            raise ConfigError(f"a {self.role} message names no tool; only a tool message does")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it; `parameters` is a JSON Schema object (`{"type": "object", ...}`)."""

    name: str
    description: str
    parameters: Mapping[str, JSON]

    def to_openai(self) -> dict[str, JSON]:
        """Returns the `{"type": "function", "function": {...}}` form that chat templates and endpoints take."""
        function: dict[str, JSON] = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call id; `error` is None, or the kind of failure that the model was shown.

    Kinds: `malformed`, `truncated`, `unknown_tool`, `invalid_arguments`, `tool_error`, `timeout`.
    """

    call_id: str
    name: str
    content: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """The identity of an exercise that several episodes share: environment id, seed, reset options, make() keywords.

    >>> Task("TextGame-v0", seed=7, kwargs={"level": 1}).key
    'TextGame-v0{"level": 1}/7'
    """

    env_id: str
    seed: int
    options: Mapping[str, JSON] = field(default_factory=dict)
    kwargs: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A stable name for the task, equal for equal tasks."""
        parts = [json.dumps(dict(part), sort_keys=True) if part else "" for part in (self.kwargs, self.options)]
        return f"{self.env_id}{parts[0]}/{self.seed}{parts[1]}"


class Status(StrEnum):
    """The end of an episode, as far as training is concerned."""

    COMPLETED = "completed"  # the environment terminated
    TRUNCATED = "truncated"  # a budget ran out; PPO bootstraps it
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    AGENT_ERROR = "agent_error"  # a launched agent crashed
    UNPLAYED = "unplayed"  # an outside agent ended, and the environment saw no action and gave no verdict

    @property
    def trainable(self) -> bool:
        """True if the episode has a reward and may enter statistics and loss."""
        return self in (Status.COMPLETED, Status.TRUNCATED)

    @property
    def reasons(self) -> frozenset[StopReason]:
        """The reasons for which the last turn of such an episode may be the last."""
        return _REASONS[self]


class StopReason(StrEnum):
    """The reason why the last turn was the last."""

    TERMINATED = "terminated"
    ENV_TRUNCATED = "env_truncated"  # the environment's own limit
    MAX_TURNS = "max_turns"
    TURN_TOKENS = "turn_tokens"
    TRAJECTORY_TOKENS = "trajectory_tokens"
    CONTEXT = "context"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    AGENT = "agent"  # the outside agent ended


_REASONS: Mapping[Status, frozenset[StopReason]] = {
    Status.COMPLETED: frozenset({StopReason.TERMINATED}),
    Status.TRUNCATED: frozenset(
        {
            StopReason.ENV_TRUNCATED,
            StopReason.MAX_TURNS,
            StopReason.TURN_TOKENS,
            StopReason.TRAJECTORY_TOKENS,
            StopReason.CONTEXT,
            StopReason.AGENT,
        }
    ),
    Status.ENV_ERROR: frozenset({StopReason.ENV_ERROR}),
    Status.ENGINE_ERROR: frozenset({StopReason.ENGINE_ERROR}),
    Status.TIMEOUT: frozenset({StopReason.DEADLINE}),
    Status.CANCELLED: frozenset({StopReason.CANCELLED}),
    Status.AGENT_ERROR: frozenset({StopReason.AGENT}),
    Status.UNPLAYED: frozenset(
        {StopReason.AGENT, StopReason.CONTEXT, StopReason.MAX_TURNS, StopReason.TRAJECTORY_TOKENS}
    ),
}
