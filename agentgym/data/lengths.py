"""Drops the rows whose prompt is too long, and reports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentgym.data.rows import Placed, messages_of
from agentgym.errors import AgentGymError, ConfigError
from agentgym.types import Message

__all__ = ["CountTokens", "without_long_prompts"]

CountTokens: TypeAlias = Callable[[Sequence[Message]], int]
"""A function that counts the tokens of a conversation, rendered for the model that will answer it."""
NUM_NAMED = 3


def without_long_prompts(
    rows: Sequence[Placed], max_prompt_tokens: int, count_tokens: CountTokens
) -> tuple[list[Placed], str]:
    """Returns the rows with at most `max_prompt_tokens` prompt tokens, and a line on the dropped ones ("" for none).

    Rows without messages are kept: their prompt is the environment's. Raises ConfigError if no row would be left.
    """
    short_rows: list[Placed] = []
    dropped: list[tuple[int, Placed]] = []
    for row in rows:
        length = _length(row, count_tokens)
        if length > max_prompt_tokens:
            dropped.append((length, row))
        else:
            short_rows.append(row)
    if not dropped:
        return short_rows, ""
    lengths = [length for length, _ in dropped]
    if not short_rows:
        shortest = f"the shortest has {min(lengths)}, the longest {max(lengths)}"
        raise ConfigError(f"all {len(rows)} prompts are longer than max_prompt_tokens={max_prompt_tokens}: {shortest}")
    examples = [f"{row.where}{_index(row)} ({length})" for length, row in dropped[:NUM_NAMED]]
    more = f" and {len(dropped) - NUM_NAMED} more" if len(dropped) > NUM_NAMED else ""
    line = (
        f"dropped {len(dropped)} of {len(rows)} rows whose prompt is longer than {max_prompt_tokens} tokens; "
        f"the longest has {max(lengths)}: {'; '.join(examples)}{more}"
    )
    return short_rows, line


def _length(row: Placed, count_tokens: CountTokens) -> int:
    messages = messages_of(row.task)
    if not messages:
        return 0
    try:
        return count_tokens(messages)
    except AgentGymError as error:
        raise ConfigError(f"{row.where}: the prompt cannot be rendered: {error}") from error


def _index(row: Placed) -> str:
    extra = row.task.options.get("extra_info")
    index = extra.get("index") if isinstance(extra, dict) else None
    return "" if index is None else f", index {index}"
