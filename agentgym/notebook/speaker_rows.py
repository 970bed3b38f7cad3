"""The conversation of an episode as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from agentgym.types import AnyCall, MalformedCall, Message, ToolResult

__all__ = ["Answered", "speaker_rows"]

MAX_ROWS = 60


class Answered(Protocol):
    """A reply with its answer, such as a turn of a trajectory."""

    @property
    def message(self) -> Message:
        """The reply."""

    @property
    def observation(self) -> str:
        """The text that answered it."""

    @property
    def tool_results(self) -> Sequence[ToolResult]:
        """The results of its calls."""

    @property
    def reward(self) -> float | None:
        """The reward of the turn."""


def speaker_rows(opening: Sequence[Message], turns: Sequence[Answered]) -> list[tuple[str, str]]:
    """Returns who speaks and the text, in order; the middle of a long conversation is left out."""
    rows: list[tuple[str, str]] = [(message.role, message.content) for message in opening]
    rows += [row for turn in turns for row in _turn_rows(turn)]
    if len(rows) <= MAX_ROWS:
        return rows
    half = MAX_ROWS // 2
    return [*rows[:half], ("...", f"{len(rows) - 2 * half} more"), *rows[-half:]]


def _turn_rows(turn: Answered) -> Iterator[tuple[str, str]]:
    message = turn.message
    if message.reasoning:
        yield "reasoning", message.reasoning
    calls = [_call_text(call) for call in message.tool_calls]
    yield "assistant", "\n".join([*([message.content] if message.content or not calls else []), *calls])
    for result in turn.tool_results:
        yield "tool", result.content
    if turn.observation and not turn.tool_results:
        yield "environment", turn.observation
    if turn.reward:
        yield "reward", f"{turn.reward:g}"


def _call_text(call: AnyCall) -> str:
    if isinstance(call, MalformedCall):
        return f"call that cannot be read: {call.raw}"
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
