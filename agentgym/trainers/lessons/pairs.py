"""Pairs of a better and a worse reply: from files of preferences, and from recorded episodes of the same task.

A file's row has `chosen` and `rejected`, and a `prompt` unless these begin with the same messages. Each is a text or
messages in OpenAI's form; `tools` are those that the model saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import ConfigError, RenderError, nearest
from agentgym.trainers.lessons.conversations import Conversation, conversation_of, conversation_rows
from agentgym.trainers.lessons.demonstrations import Demonstration, Pair
from agentgym.trainers.lessons.recorded_episodes import episode_rows, held_out_lines, read_played
from agentgym.trainers.lessons.sft_rows import rows_of_file
from agentgym.trajectory import Trajectory
from agentgym.types import Task

__all__ = ["PairSet", "pairs_of_episodes", "pairs_of_files"]


@dataclass(frozen=True)
class PairSet:
    """The pairs to learn, with a report of what was left out."""

    pairs: tuple[Pair, ...]
    report: tuple[str, ...]
    task: Task | None = None
    """A task of the episodes; None for pairs of files."""


def pairs_of_files(paths: Sequence[str], renderer: TemplateRenderer, window: int) -> PairSet:
    """Reads files, named as in `data.train`; raises ConfigError, naming the row, for one that is not a pair."""
    pairs: list[Pair] = []
    for path in paths:
        for where, row in rows_of_file(path, "pair"):
            try:
                pairs.append(pair_of_row(row, renderer))
            except (ConfigError, RenderError) as error:
                raise ConfigError(f"{where}: {error}") from error
    return _keep_fitting(pairs, window, f"{len(pairs)} pairs")


def pair_of_row(row: Mapping[str, object], renderer: TemplateRenderer) -> Pair:
    """Returns the pair of a file's row; only what comes after the shared messages is learned."""
    for name in ("chosen", "rejected"):
        if name not in row:
            near = nearest(name, row) or "."
            raise ConfigError(f"there is no column {name!r}{near} It has {', '.join(row) or 'none'}")
    prompt, tools = _messages(row.get("prompt"), "user"), row.get("tools")
    both = [
        conversation_of({"messages": [*prompt, *_messages(row[name], "assistant")], "tools": tools})
        for name in ("chosen", "rejected")
    ]
    messages = [conversation.messages for conversation in both]
    shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*messages, strict=False)))
    if shared == min(map(len, messages)):
        raise ConfigError("chosen and rejected are the same, or one begins with the whole of the other")
    chosen, rejected = (_row(conversation, shared, renderer) for conversation in both)
    return Pair(chosen, rejected)


def pairs_of_episodes(
    runs: Sequence[Path], renderer: TemplateRenderer, vocab_size: int, window: int, *, per_task: int = 1
) -> PairSet:
    """Makes pairs of recorded episodes of the same task: the best with the worst, the second best with the next, ...

    At most `per_task` of a task are made; episodes of equal rewards, or with a rewritten history, make none. The report
    names the episodes of pairs that are on held-out tasks.
    """
    tasks: dict[str, list[Trajectory]] = {}
    played = read_played(runs)
    for trajectory in played:
        if trajectory.reward is not None and len(trajectory.rows) == 1 and trajectory.num_trained_tokens:
            tasks.setdefault(trajectory.task.key, []).append(trajectory)
    pairs: list[Pair] = []
    members_of: dict[int, tuple[Trajectory, Trajectory]] = {}
    for members in tasks.values():
        ranked = sorted(members, key=lambda member: -(member.reward or 0.0))
        for place in range(min(per_task, len(ranked) // 2)):
            better, worse = ranked[place], ranked[-1 - place]
            if better.reward != worse.reward:
                (chosen,), (rejected,) = (episode_rows(renderer, vocab_size, each) for each in (better, worse))
                pairs.append(Pair(chosen, rejected))
                members_of[id(pairs[-1])] = (better, worse)
    line = f"{len(pairs)} pairs of {len(played)} episodes of {len(tasks)} tasks"
    task = next(iter(tasks.values()))[0].task if tasks else None
    pair_set = _keep_fitting(pairs, window, line)
    learned = [episode for pair in pair_set.pairs for episode in members_of[id(pair)]]
    return PairSet(pair_set.pairs, (*pair_set.report, *held_out_lines(learned)), task)


def _messages(value: object, role: str) -> list[object]:
    """Returns the messages of a cell: a text is one of `role`."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"a text or a list of messages was wanted, got {value!r:.60}")
    return list(value)


def _row(conversation: Conversation, shared: int, renderer: TemplateRenderer) -> Demonstration:
    """Returns a conversation as a row in which the replies after the shared messages are learned."""
    rows = conversation_rows(renderer, conversation, first=shared)
    if len(rows) != 1 or not any(rows[0].mask):
        raise ConfigError("its replies are no single row: there are none, or the template rewrites what came before")
    return rows[0]


def _keep_fitting(pairs: Sequence[Pair], window: int, line: str) -> PairSet:
    """Returns the pairs that fit into the model's window; raises ConfigError if none is left."""
    fitting = tuple(pair for pair in pairs if max(len(pair.chosen.ids), len(pair.rejected.ids)) <= window + 1)
    num_long = len(pairs) - len(fitting)
    left_out = f"; left out: {num_long} longer than the window of {window}" if num_long else ""
    if not fitting:
        raise ConfigError(f"nothing is left to learn: {line}{left_out}")
    return PairSet(fitting, (line + left_out,))
