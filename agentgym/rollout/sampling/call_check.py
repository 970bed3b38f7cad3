"""A warning about a model whose first episodes hold few valid tool calls, by what their replies hold instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.trajectory import Trajectory
from agentgym.types import MalformedCall, ToolCall

__all__ = ["describe_missing_calls"]

FAULTS = ("malformed_calls", "truncated_calls", "unknown_tools", "invalid_arguments")
MAX_CUT_SHARE = 0.25
"""The share of episodes with a cut reply above which the limit of a reply is to blame."""
MIN_READ_SHARE = 0.1
"""The share of the calls that can be read below which their format does not fit."""
REMEDY = "The model does not know these tools: `agentgym sft` teaches them"
NUM_READ = 64
"""The replies that are searched for the calls of other formats."""


def describe_missing_calls(episodes: Sequence[Trajectory]) -> str:
    """Returns why most tool calls of these episodes are not valid, and what to do; empty if they are. Each has a reply.

    The chat format is named where replies are in another one, or where hardly any of their calls can be read.
    """
    counts = Counter[str]()
    for episode in episodes:
        counts.update({name: int(episode.metrics[name]) for name in ("num_tool_calls", *FAULTS)})
    num_calls, num_failing = counts["num_tool_calls"], sum(counts[name] for name in FAULTS)
    has_valid = num_failing < num_calls
    if not episodes or (has_valid and (2 * num_failing <= num_calls or any(episode.success for episode in episodes))):
        return ""
    num_cut = sum(episode.num_cut_replies > 0 for episode in episodes)
    if num_cut > MAX_CUT_SHARE * len(episodes) and not has_valid:
        longest = max((size for episode in episodes for size in episode.reply_tokens), default=0)
        return (
            f"in {num_cut} of them a limit of tokens cut the reply before its call (the longest has {longest} tokens)."
            " Raise the limit: turn_tokens (--limits.turn-tokens in training, --turn-tokens in an evaluation), or the"
            " window where that is full"
        )
    if not has_valid and (formats := _formats_of_calls(episodes)):
        (name, number), *_ = formats.most_common(1)
        return (
            f"{number} replies hold calls as the format {name!r} has them, which is not the model's here: does the chat"
            f" template's call format fit? --family {name} reads these (`agentgym tools families` lists all)"
        )
    num_read = counts["unknown_tools"] + counts["invalid_arguments"]
    if not num_calls:
        return f"replies hold no calls. {REMEDY}"
    fits = has_valid or (num_read > 0 and num_read >= MIN_READ_SHARE * counts["malformed_calls"])
    first = _first_error(episodes, ("unknown_tool", "invalid_arguments") if fits else ("malformed",))
    numbers = "{} malformed, {} cut by the end of their reply, {} unknown tools, {} with invalid arguments".format(
        *(counts[fault] for fault in FAULTS)
    )
    if fits:
        share = f"{num_calls - num_failing} of {num_calls}" if has_valid else "none"
        return f"calls are read, and {share} can be run ({numbers}; the first: {first}). {REMEDY}"
    return f"does the chat template's call format fit? ({numbers}; the first: {first}) `agentgym models check` tries it"


def _formats_of_calls(episodes: Sequence[Trajectory]) -> Counter[str]:
    """Returns the formats that read a call of one of the episodes' tools from replies, with the number of replies."""
    names = {spec.name for episode in episodes for row in episode.rows for spec in row.tools or ()}
    formats = Counter[str]()
    for text in islice(_texts(episodes), NUM_READ):
        for form in dict.fromkeys(FORMATS.values()):
            calls = form.parse(text).tool_calls
            if any(isinstance(call, ToolCall) and call.name in names for call in calls):
                formats[form.name] += 1
    return formats


def _texts(episodes: Sequence[Trajectory]) -> Iterator[str]:
    """Yields the texts of replies, and those of calls that could not be read."""
    for message in (turn.message for episode in episodes for turn in episode.turns):
        yield message.content
        yield from (call.raw for call in message.tool_calls if isinstance(call, MalformedCall))


def _first_error(episodes: Sequence[Trajectory], kinds: Sequence[str]) -> str:
    """Returns the first line of the first answer to a call that failed in one of these ways."""
    results = (result for episode in episodes for turn in episode.turns for result in turn.tool_results)
    errors = (result.content.partition("\n")[0] for result in results if result.error in kinds)
    return f"{next(errors, 'none was answered'):.200}"
