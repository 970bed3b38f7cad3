"""Recognizes the sound records of a run by few calls for each row; all others are left to the exact checks."""

from __future__ import annotations

import marshal
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

import numpy as np

from agentgym.chat_templates.renderers.chatml import ChatMLRenderer
from agentgym.chat_templates.renderers.prompt_end import REACH
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import AgentGymError
from agentgym.evaluation.run_check.basis import Basis, Memo, Record, StoredSpan
from agentgym.evaluation.run_check.record_checks import (
    answer_problem,
    by_endpoint,
    lacks_ids,
    possible_answers,
    stop_problem,
    version_bounds,
)
from agentgym.rollout.record.episode_digests import credit_digest, numbers_digest
from agentgym.rollout.record.episodes_file import message_from_json
from agentgym.rollout.record.stored_fields import check_fields
from agentgym.settings import is_bundled
from agentgym.trajectory import Status, StopReason, are_logprobs, success_of
from agentgym.types import Task, ToolResult

__all__ = ["SoundRecords"]

MAX_KEYS, MAX_KEY = 1 << 22, 1 << 12
"""The most bytes of all turns that are remembered as sound, and of one."""
ANY_ID = 1 << 31
"""The size of the vocabulary of a run whose tokenizer is unknown."""
EXTENDS_BY_LAST_ID = (TemplateRenderer.extend, ChatMLRenderer.extend)
"""The functions that read no id of a complete reply but the last."""
FIELDS = frozenset(("phase", "step", "group", "member", "info", "metrics"))
"""The fields that every record has and that are not all read here."""
_FLAGS = {"prompt": b"\0", "policy": b"\1", "env": b"\2"}
ERRORS = (AgentGymError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""The errors of a record that is no episode; the exact checks meet and report them."""


class SoundRecords:
    """Recognizes records in which every check of `CHECKS` finds nothing, of the usual form.

    The usual form is an episode with a reward whose rows alternate between replies and answers. What is not recognized
    may be sound too. Turns that were sound before are recognized by the bytes of all that the checks read of them.
    """

    def __init__(self, basis: Basis) -> None:
        self.basis = basis
        renderer = self._renderer = basis.renderer
        self._size = ANY_ID if renderer is None else renderer.vocab_size
        self._stops = frozenset(() if renderer is None else renderer.stop_ids)
        ours = renderer if isinstance(renderer, TemplateRenderer) and is_bundled(type(renderer)) else None
        self._template = ours
        self._extends_by_last_id = ours is not None and type(ours).extend in EXTENDS_BY_LAST_ID
        self._sound: Memo[None] = Memo(MAX_KEYS)

    def counts(self, record: Record) -> Mapping[str, int] | None:
        """Returns the number of checks by property, and of `tokens`; None if the record is not recognized."""
        try:
            if not record["rows"] or by_endpoint(record) or lacks_ids(record) or not _is_sound_outcome(record):
                return None
            return self._counts(record)
        except ERRORS:
            return None

    def _counts(self, record: Record) -> Mapping[str, int] | None:
        counts = Counter(dict.fromkeys(("status", "trajectory", "reward", "credit", "advantages"), 1))
        lengths: list[int] = []
        least, most = version_bounds(record, self.basis.max_staleness)
        least, turn = max(least, 0), 0
        for number, row in enumerate(record["rows"]):
            versions = self._sound_versions(row)
            if versions is None or not least <= versions[0] <= versions[-1] <= most:
                return None
            least = versions[-1]
            if not self._is_sound_prompt(record, number, counts) or not self._are_sound_turns(record, number, turn):
                return None
            spans = row["spans"]
            turn += len(spans) // 2
            lengths.append(len(versions))
            counts["logprobs"] += len(spans)
            counts["tokens"] += sum([len(span["ids"]) for span in spans])
        if turn != len(record["turns"]) or not _are_advantages(record["advantages"], lengths):
            return None
        counts["tool_answers"] = counts["versions"] = turn
        counts["spans"] = counts["mask"] = counts["digest"] = len(lengths)
        if self._renderer is not None:
            counts["vocabulary"] = counts["logprobs"]
            counts["stop_token"] = counts["reply"] = turn
            counts["prefix"] = counts["logprobs"] - len(lengths) - turn
        return counts

    def _sound_versions(self, row: Record) -> list[int] | None:
        """Returns the policy versions of a row whose form, numbers, mask and digest are sound, in order; else None."""
        spans = row["spans"]
        replies, sources = spans[1::2], [span["source"] for span in spans]
        lengths = [len(span["ids"]) for span in spans]
        if sources != ["prompt", *["policy", "env"] * len(replies)][: len(spans)] or not all(lengths):
            return None
        if {*map(len, spans[::2])} != {2} or {*map(len, replies)} != {4}:  # such a span has other fields
            return None
        logprobs = [span["logprobs"] for span in replies]
        versions = [span["policy_versions"] for span in replies]
        if not [*map(len, logprobs)] == [*map(len, versions)] == lengths[1::2]:
            return None
        joined, ordered = [*chain.from_iterable(logprobs)], [*chain.from_iterable(versions)]
        if not are_logprobs(joined) or ordered != sorted(ordered):
            return None
        ids = array("q", [*chain.from_iterable([span["ids"] for span in spans])])
        if np.frombuffer(ids, np.uint64).max() >= self._size:  # as unsigned numbers, negative ones are too great
            return None
        flags = b"".join([_FLAGS[source] * length for source, length in zip(sources, lengths, strict=True)])
        digest = numbers_digest(ids, flags, array("d", joined), array("q", ordered))
        is_stored = row["mask"] == [[index % 2, length] for index, length in enumerate(lengths)]
        return ordered if is_stored and row["digest"] == digest else None

    def _is_sound_prompt(self, record: Record, number: int, counts: Counter[str]) -> bool:
        row, basis = record["rows"][number], self.basis
        digest = row.get("tools")
        if digest is not None:
            counts["tools"] += 1
            if digest not in basis.menus or not basis.has_sound_menu(digest):
                return False
        if "messages" not in row:
            return True
        if self._renderer is None:
            return all(map(message_from_json, row["messages"]))
        counts["prompt"] += 1
        return bool(row["spans"][0]["ids"] == basis.prompt(record, number))

    def _are_sound_turns(self, record: Record, number: int, first: int) -> bool:
        """Returns True if the replies and answers of a row, from its first turn on, are those of their turns."""
        turns, spans = record["turns"], record["rows"][number]["spans"]
        ids = [*spans[0]["ids"]]
        for index, (reply, answer) in enumerate(zip_longest(spans[1::2], spans[2::2]), first):
            turn = turns[index]
            answered = [result["call_id"] for result in turn["tool_results"]]
            if answered and answered != [call["id"] for call in turn["message"]["tool_calls"]]:
                return False
            if not self._is_sound_reply(record, number, index, reply, ids):
                return False
            ids += reply["ids"]
            answer_ids = None if answer is None else answer["ids"]
            if not self._is_sound_answer(turns, index, ids, answer_ids):
                return False
            ids += answer_ids or ()
        return True

    def _is_sound_reply(self, record: Record, number: int, index: int, reply: Record, before: list[int]) -> bool:
        turn, renderer, template = record["turns"][index], self._renderer, self._template
        opens = template is not None and template.in_reasoning(before[-REACH:])
        tools, message = record["rows"][number].get("tools"), turn["message"]
        read = ("reply", reply["ids"], opens, tools, message, turn["finish_reason"], turn.get("stop"))
        key = marshal.dumps(read, 2)
        if key in self._sound and (renderer is None or template is not None):
            return True
        recorded = message_from_json(message)
        if renderer is not None:
            span = StoredSpan(number, index, len(before), "policy", reply["ids"], reply)
            if stop_problem(renderer, self._stops, span, turn) or self.basis.reply(record, span) != recorded:
                return False
        self._remember(key)
        return True

    def _is_sound_answer(self, turns: Sequence[Record], index: int, before: list[int], ids: list[int] | None) -> bool:
        """Returns True if the answer of a turn, None after a row's last one, is the render of what is recorded."""
        turn, messages = turns[index], turns[index].get("messages")
        asked = turns[index + 1].get("asked") if index + 1 < len(turns) else None
        read = ("answer", before[-1], ids, turn["tool_results"], turn["observation"], messages, asked)
        key = marshal.dumps(read, 2)
        reads_key_alone = self._extends_by_last_id and before[-1] in self._stops
        if key in self._sound and (reads_key_alone or ids is None or self._renderer is None):
            return True
        for result in turn["tool_results"]:
            ToolResult(**result)
        if messages is not None:
            [*map(message_from_json, messages)]
        renderer = None if ids is None else self._renderer
        if renderer is not None and answer_problem(renderer, before, ids or [], possible_answers(turns, index)):
            return False
        self._remember(key)
        return True

    def _remember(self, key: bytes) -> None:
        if len(key) <= MAX_KEY:
            self._sound.store(key, None, len(key))


def _is_sound_outcome(record: Record) -> bool:
    """Returns True for an episode with a reward that follows from its turns, and the digest of its credit."""
    status, rewards = Status(record["status"]), [turn["reward"] for turn in record["turns"]]
    Task(**record["task"])
    check_fields(record)
    if not (status.trainable and rewards and record.keys() >= FIELDS and record["error"] is None):
        return False
    total = math.fsum(rewards)
    if StopReason(record["stop_reason"]) not in status.reasons or not math.isfinite(total):
        return False
    if not math.isclose(record["reward"], total, rel_tol=1e-9, abs_tol=1e-12):
        return False
    if success_of(record["metrics"], total) != record["success"]:
        return False
    return bool(record["credit"] == credit_digest(rewards, record["advantages"]))


def _are_advantages(rows: Sequence[Sequence[float]] | None, lengths: Sequence[int]) -> bool:
    """Returns True if there are none, or a finite number for each sampled id of each row."""
    return rows is None or ([*map(len, rows)] == lengths and all(math.isfinite(sum(row)) for row in rows))
