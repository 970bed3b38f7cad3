"""The conversation that the next prompt shows: as sampled, as the template renders it, or as a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least
from agentgym.types import Message

__all__ = ["ASK", "CompactionConfig", "History", "compact_messages"]

History = Literal["append", "rerender"]
"""The way in which earlier turns are shown. `append` keeps what was sampled, old reasoning included, and gives one row.
`rerender` shows the model what the template makes of the whole conversation (most drop old reasoning), and begins a row
at each real rewrite; it renders everything at every turn, so its cost grows with the square of the number of turns."""

ASK = (
    "The conversation is about to be shortened. Write down, in plain text and without calling a tool, what you need to "
    "go on: what you found out, what you have done, and what is left to do. Only your notes, the first messages and "
    "the last exchange are kept."
)
NOTES = "Your notes on what has happened since:"


@config_class
class CompactionConfig:
    """The condition under which the model is asked to summarize an episode, so that it can outlast the context window.

    Off by default. The summary is a turn of its own, with the reward 0, that has no answer and does not count in
    `max_turns`. The next row begins with the messages of the reset, the summary, and the last reply with its answer.
    """

    at: float | None = None
    """The share of the context window, such as 0.8, beyond which a prompt is not sent before the model has been asked
    for a summary; None never asks."""
    tokens: int = 512
    """The most ids of a summary."""
    train: bool = True
    """Trains summaries, with the advantage of their episode."""

    def __post_init__(self) -> None:
        if self.at is not None and not 0.0 < self.at < 1.0:
            raise ConfigError(f"compaction.at is a share of the context window between 0 and 1, got {self.at}")
        check_at_least(1, self, "tokens", where="compaction.")


def compact_messages(
    opening: Sequence[Message], summary: str, reply: Message, answer: Sequence[Message]
) -> tuple[Message, ...]:
    """Returns the messages after a summary: the opening followed by the summary, and the last exchange."""
    notes = f"{NOTES}\n{summary.strip()}"
    if opening and opening[-1].role == "user":
        last = replace(opening[-1], content=f"{opening[-1].content}\n\n{notes}")
        return (*opening[:-1], last, reply, *answer)
    return (*opening, Message("user", notes), reply, *answer)
