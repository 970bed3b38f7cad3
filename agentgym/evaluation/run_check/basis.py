"""The reference that records are compared with; what equal records share is computed once."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.renderers.chatml import ChatMLRenderer
from agentgym.chat_templates.renderers.prompt_end import REACH
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.rollout.record.episodes_file import EpisodeRecord, message_from_json, record_from_json
from agentgym.rollout.record.tools_file import Menus, menu_digest
from agentgym.settings.functions import is_bundled
from agentgym.types import Message, ToolSpec

__all__ = ["Basis", "Memo", "Record", "StoredSpan"]

V = TypeVar("V")
Record: TypeAlias = Mapping[str, Any]
"""A line of `episodes.jsonl` that is not validated yet."""
MAX_PROMPT_IDS = 1 << 17
"""The most ids of all prompts that are cached."""
MAX_TURN_BYTES, MAX_TURN = 1 << 22, 1 << 12
"""The most bytes of all turns that are remembered, and of one."""

EXTENDS_BY_LAST_ID = (TemplateRenderer.extend, ChatMLRenderer.extend)


class Memo(dict[bytes, V]):
    """Values by bytes that name all they were computed from; emptied when their sizes would exceed `room`."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room, self._size = room, 0

    def store(self, key: bytes, value: V, size: int) -> None:
        """Stores a value of a size."""
        if self._size + size > self._room:
            self.clear()
            self._size = 0
        self[key] = value
        self._size += size


class StoredSpan(NamedTuple):
    """A span with its position: `turn` is that of the last reply up to here, -1 before the first."""

    row: int
    turn: int
    start: int
    source: str
    ids: list[int]
    raw: Record


class Basis:
    """The run's chat format, if any, and its tool sets by digest."""

    def __init__(
        self,
        renderer: Renderer | None = None,
        menus: Menus | None = None,
        max_staleness: int | None = None,
        credit: frozenset[str] | None = None,
    ) -> None:
        self.renderer = renderer
        self.menus: Menus = {} if menus is None else menus
        self.max_staleness = max_staleness
        """The number of updates by which a training run's tokens may be older than its weights; None for others."""
        self.credit = credit
        """The labels of the branches that are trained; None if that is not known."""
        self._sound_menus: dict[str, bool] = {}
        self._prompts: Memo[list[int]] = Memo(MAX_PROMPT_IDS)
        self.sound_turns: Memo[None] = Memo(MAX_TURN_BYTES)
        """The keys of replies and answers in which no problem was found: most of a run's turns recur."""
        self.stops = frozenset(() if renderer is None else renderer.stop_ids)
        is_ours = is_bundled(type(renderer))
        self._template = renderer if isinstance(renderer, TemplateRenderer) and is_ours else None
        self._record: Record | None = None
        self._spans: list[StoredSpan] = []
        self._episode: EpisodeRecord | None = None

    def remember_texts(self) -> AbstractContextManager[None]:
        """Renders equal texts once inside the context: episodes of one task share their prompts and many answers."""
        renderer = self.renderer
        return renderer.tokenizer.remember_texts() if isinstance(renderer, TemplateRenderer) else nullcontext()

    def num_ids(self, source: str) -> int:
        """Returns the number of ids that a span of this source has: a model samples the ids too that have no text."""
        renderer = self.renderer
        assert renderer is not None
        sampled = renderer.tokenizer.num_sampled if isinstance(renderer, TemplateRenderer) else 0
        return max(renderer.vocab_size, sampled) if source == "policy" else renderer.vocab_size

    def spans(self, record: Record) -> list[StoredSpan]:
        """Returns the spans of all rows of a record; those of the newest one are cached."""
        self._turn_to(record)
        if not self._spans:
            turn = -1
            for row, stored in enumerate(record["rows"]):
                start = 0
                for raw in stored["spans"]:
                    source, ids = raw["source"], raw["ids"]
                    turn += source == "policy"
                    self._spans.append(StoredSpan(row, turn, start, source, ids, raw))
                    start += len(ids)
        return self._spans

    def episode(self, record: Record) -> EpisodeRecord:
        """Returns the episode of a record; the newest one is cached. Raises InvalidTrajectory."""
        self._turn_to(record)
        if self._episode is None:
            self._episode = record_from_json(record, self.menus)
        return self._episode

    def _turn_to(self, record: Record) -> None:
        if self._record is not record:
            self._record, self._spans, self._episode = record, [], None

    def tools(self, record: Record, row: int) -> tuple[ToolSpec, ...]:
        """Returns the tools that the model was shown; none if the record names none."""
        return self.menus.get(record["rows"][row].get("tools", ""), ())

    def has_sound_menu(self, digest: str) -> bool:
        """Returns True if the tools under the digest in `tools.jsonl` have it."""
        is_sound = self._sound_menus.get(digest)
        if is_sound is None:
            is_sound = self._sound_menus[digest] = menu_digest(self.menus[digest]) == digest
        return is_sound

    def shared_ids(self, record: Record, row: int) -> list[int] | None:
        """Returns the ids that a fork has of another row, empty if there is no such place; None for any other row."""
        origin = record["rows"][row].get("origin")
        if origin is None or origin["row"] is None:
            return None
        spans = [span for span in self.spans(record) if span.row == origin["row"] < row]
        turn, source = (-1, "prompt") if origin["turn"] is None else (origin["turn"], "policy")
        for index, span in enumerate(spans):
            if span.source == source and (source == "prompt" or span.turn == turn):
                return [token for before in spans[: index + 1] for token in before.ids]
        return []

    def prompt(self, record: Record, row: int) -> Sequence[int]:
        """Returns the ids that a row begins with, by its messages and tools; raises RenderError.

        They are a render, or for a fork what it shares and the render of the rest. The last ones are cached, because
        the episodes of a group have the same.
        """
        assert self.renderer is not None
        stored = record["rows"][row]
        shared = self.shared_ids(record, row)
        if shared is not None:
            new = [message_from_json(message) for message in stored["messages"][stored["origin"]["num_shared"] :]]
            return [*shared, *self.renderer.extend(shared, new)] if new else shared
        key = marshal.dumps((stored["messages"], stored.get("tools")), 2)
        ids = self._prompts.get(key)
        if ids is None:
            messages = [message_from_json(message) for message in stored["messages"]]
            ids = self.renderer.render(messages, self.tools(record, row))
            self._prompts.store(key, ids, len(ids))
        return ids

    def reply(self, record: Record, span: StoredSpan) -> Message:
        """Returns the message that the ids of a reply parse to."""
        assert self.renderer is not None
        stop: str = record["turns"][span.turn].get("stop", "")
        ends = {"stop": stop} if stop else {}
        before = _ids_before(record["rows"][span.row], span.start)
        return self.renderer.parse(span.ids, self.tools(record, span.row), before, **ends)

    def reply_key(self, record: Record, span: StoredSpan) -> bytes:
        """Returns the bytes of all that the checks of a reply read; none for a renderer that may read more.

        Our own `TemplateRenderer`s read no more of the prompt than whether it opens reasoning.
        """
        if self._template is None:
            return b""
        row, turn = record["rows"][span.row], record["turns"][span.turn]
        opens = self._template.in_reasoning(_ids_before(row, span.start, REACH))
        recorded = (turn["message"], turn["finish_reason"], turn.get("stop"))
        return marshal.dumps((span.ids, opens, row.get("tools"), *recorded), 2)

    def answer_key(self, record: Record, span: StoredSpan, before: Sequence[int]) -> bytes:
        """Returns the bytes of all that the check of an answer reads, after the ids `before`; none if it may read more.

        After a stop id, the functions `EXTENDS_BY_LAST_ID` read no other id.
        """
        extend = type(self._template).extend if self._template is not None else None
        if extend not in EXTENDS_BY_LAST_ID or self.stops.isdisjoint(before[-1:]):
            return b""
        turns = record["turns"]
        turn, following = turns[span.turn], turns[span.turn + 1 : span.turn + 2]
        recorded = (turn["tool_results"], turn["observation"], turn.get("messages"))
        return marshal.dumps((before[-1], span.ids, *recorded, *[reply.get("asked") for reply in following]), 2)

    def remember(self, key: bytes) -> None:
        """Adds a key of a turn without a problem to `sound_turns`."""
        if 0 < len(key) <= MAX_TURN and key not in self.sound_turns:
            self.sound_turns.store(key, None, len(key))


def _ids_before(row: Mapping[str, Any], start: int, max_ids: int | None = None) -> list[int]:
    """Returns the ids of a stored row before an index, or only the last `max_ids` of them."""
    if max_ids is None:
        return list(chain.from_iterable(span["ids"] for span in row["spans"]))[:start]
    ids_before: list[int] = []
    for span in row["spans"]:
        ids = span["ids"]
        if start <= 0:
            break
        if start - len(ids) < max_ids:
            ids_before += ids[:start]
        start -= len(ids)
    return ids_before[-max_ids:]
