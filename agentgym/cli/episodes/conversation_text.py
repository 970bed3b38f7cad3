"""An episode as text for a terminal: what it was, and its conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from agentgym.rewards.reply import conversation
from agentgym.rollout.record.branches import branch_lines, is_tree
from agentgym.rollout.record.episodes_file import EpisodeRecord
from agentgym.types import AnyCall, MalformedCall, Message

__all__ = ["conversation_text"]

INDENT = "    "


def conversation_text(line: int, record: EpisodeRecord) -> str:
    """Returns the episode of a line: its facts, and each message with the calls in it.

    A text may have any characters: what prints it spells out those that control a terminal.
    """
    episode = record.trajectory
    outcome = {True: "succeeded", False: "failed", None: "no reward"}[episode.success]
    reward = "" if episode.reward is None else f", reward {episode.reward:g}"
    facts = (
        f"episode {line}",
        f"{record.phase} step {record.step}",
        episode.task.key,
        f"{outcome}{reward}",
        f"{episode.status}, {episode.stop_reason}",
        f"{len(episode.turns)} turns",
    )
    lines = [f"=== {' | '.join(facts)}"]
    if episode.error:
        lines.append(f"error: {episode.error}")
    if is_tree(episode.rows):
        lines += branch_lines(episode.rows)
    return "\n".join([*lines, *_message_lines(conversation(episode)), ""])


def _message_lines(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        name = f"{message.role} {message.name}" if message.name else message.role
        yield from _text_lines(name, message.content) if message.content or not message.tool_calls else ()
        if message.reasoning:
            yield from _text_lines("reasoning", message.reasoning)
        yield from map(_call_line, message.tool_calls)


def _text_lines(name: str, text: str) -> Iterator[str]:
    first, *others = text.split("\n")
    yield f"{name}: {first}"
    yield from (f"{INDENT}{line}" for line in others)


def _call_line(call: AnyCall) -> str:
    if isinstance(call, MalformedCall):
        return f"assistant calls (malformed): {call.raw}"
    arguments = (
        f"{name}={json.dumps(value, ensure_ascii=False, default=dict)}" for name, value in call.arguments.items()
    )
    return f"assistant calls {call.name}({', '.join(arguments)})"
