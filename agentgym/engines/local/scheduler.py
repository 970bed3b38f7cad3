"""The scheduler of the in-process engine: waiting requests, requests at work, and their sampled tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.sampling import penalize, uniforms
from agentgym.engines.protocol import Completion, FinishReason, Sampling
from agentgym.engines.stop_strings import ends_with_stop, may_end_stop
from agentgym.errors import EngineError
from agentgym.routed_experts import RoutedExperts

__all__ = ["SamplingRequest", "Scheduler", "checked_prompt"]

# Shape suffixes: S slots, W window, R sampled rows, J stop ids.

_MIN_SHARED = 16  # copying a prefix, or waiting a step for one that is being computed, pays from this many tokens on
_MAX_KNOWN = 100_000  # ids of which it is known whether they may complete a stop string


class Prefix(NamedTuple):
    """The first tokens of a request's prompt."""

    request: SamplingRequest
    num_tokens: int


@dataclass(eq=False, slots=True)
class SamplingRequest:
    """A reply that is being sampled."""

    prompt_T: NDArray[np.int64]
    sampling: Sampling
    session: str
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    slot: int = -1
    """The slot index; -1 while the request waits."""
    fresh: bool = field(default=True)
    """True until the prompt is being read, so a prefix may still be copied from another slot."""
    awaited: Prefix | None = None
    """The prefix that another request is computing, which this one waits for."""


def checked_prompt(prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int, window: int) -> NDArray[np.int64]:
    """Returns the prompt's ids; raises EngineError for a request that cannot be sampled."""
    prompt_T = np.asarray(prompt_ids, np.int64)
    if not prompt_T.size:
        raise EngineError("the prompt is empty; the local engine needs at least one token id")
    if sampling.grammar:
        raise EngineError("the local engine takes no grammar; constrain the replies of SGLang or vLLM")
    if prompt_T.min() < 0 or prompt_T.max() >= vocab_size:
        bad = int(prompt_T.min() if prompt_T.min() < 0 else prompt_T.max())
        raise EngineError(
            f"token id {bad} is outside [0, {vocab_size}); encode the prompt with this model's own tokenizer"
        )
    if len(prompt_T) + sampling.max_tokens > window:
        raise EngineError(
            f"prompt of {len(prompt_T)} tokens and max_tokens {sampling.max_tokens} are over the window of {window};"
            " shorten the prompt or lower max_tokens"
        )
    return prompt_T


class Scheduler:
    """Assigns slots to waiting requests in order of arrival, plans steps, and stores the sampled tokens."""

    def __init__(self, cache: SlotCache, max_step_tokens: int, keep_idle_s: float) -> None:
        self.cache, self.max_step_tokens, self.keep_idle_s = cache, max_step_tokens, keep_idle_s
        num_slots, window = cache.num_slots, cache.window
        self.waiting: dict[str, SamplingRequest] = {}
        """The requests without a slot by session, in order of arrival."""
        self.active: dict[int, SamplingRequest] = {}
        self.temperature_S = np.ones(num_slots, np.float32)
        self.top_p_S = np.ones(num_slots, np.float32)
        self.top_k_S = np.zeros(num_slots, np.int64)
        self.min_p_S = np.zeros(num_slots, np.float32)
        self._uniform_SW = np.zeros((num_slots, window), np.float32)
        self._logprob_SW = np.zeros((num_slots, window), np.float32)
        self._version_SW = np.zeros((num_slots, window), np.int64)
        self._stop_SJ = np.full((num_slots, 1), -1, np.int64)
        self._end_S = np.zeros(num_slots, np.int64)
        self._reads_text_S = np.zeros(num_slots, np.bool_)
        self._penalizes_S = np.zeros(num_slots, np.bool_)
        self._may_end: dict[tuple[int, tuple[str, ...]], bool] = {}
        self._slots: NDArray[np.int64] | None = None
        self._num_fresh = 0

    def add(self, request: SamplingRequest) -> None:
        """Has the request wait for a slot; no other one of its session waits or is at work."""
        self.waiting[request.session] = request

    def admit(self) -> None:
        """Gives slots to waiting requests: first to sessions that still have theirs, then in order of arrival."""
        now = time.monotonic()
        if not self.waiting:
            return
        for session in self.cache.idle_sessions():
            if session in self.waiting:
                self._join(self.waiting.pop(session), now)
        count = min(len(self.waiting), self.cache.num_available(now - self.keep_idle_s))
        joining = [self.waiting.pop(session) for session in list(islice(self.waiting, count))]
        for request in sorted(joining, key=lambda request: len(request.prompt_T)):  # similar lengths become neighbors
            self._join(request, now)

    def patience_s(self) -> float | None:
        """Returns the seconds until a waiting request may take an idle session's slot; None if nothing waits."""
        since = self.cache.idle_since
        return None if not self.waiting or since is None else max(0.0, since + self.keep_idle_s - time.monotonic())

    def _join(self, request: SamplingRequest, now: float) -> None:
        slot = self.cache.acquire(request.session, now - self.keep_idle_s)
        sampling, num_prompt = request.sampling, len(request.prompt_T)
        self.cache.load(slot, request.prompt_T)
        request.slot, request.fresh = slot, True
        self.active[slot], self._slots = request, None
        self._num_fresh += 1
        self.temperature_S[slot], self.top_p_S[slot] = sampling.temperature, sampling.top_p
        self.top_k_S[slot], self.min_p_S[slot] = sampling.top_k, sampling.min_p
        self._end_S[slot] = num_prompt + sampling.max_tokens
        self._reads_text_S[slot] = bool(sampling.stop) and sampling.decode is not None
        self._penalizes_S[slot] = sampling.penalizes
        if sampling.temperature > 0:
            self._uniform_SW[slot, num_prompt : self._end_S[slot]] = uniforms(sampling.seed, sampling.max_tokens)
        if (wider := len(sampling.stop_ids) - self._stop_SJ.shape[1]) > 0:
            self._stop_SJ = np.pad(self._stop_SJ, ((0, 0), (0, wider)), constant_values=-1)
        self._stop_SJ[slot] = -1
        self._stop_SJ[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def plan(self) -> Rows:
        """Returns the rows of the next step; at least one while any request is active."""
        if self._slots is None:
            self._slots = np.array(sorted(self.active), np.int64)
        slots, cache = self._slots, self.cache
        if self._num_fresh:
            slots = self._share(slots)
        due = cache.num_known_S[slots] - cache.num_valid_S[slots]
        decode = slots if (due == 1).all() else slots[due == 1]
        if len(decode) == len(slots):
            return Rows(slots, cache.num_valid_S[slots], len(slots), (), np.arange(len(slots)))
        return self._with_extends(decode, slots[due > 1])

    def _with_extends(self, decode: NDArray[np.int64], extend: NDArray[np.int64]) -> Rows:
        room = max(self.max_step_tokens - len(decode), 64)
        slot_parts, position_parts = [decode], [self.cache.num_valid_S[decode]]
        extends, last_rows, row = [], list(range(len(decode))), len(decode)
        for slot in extend.tolist():
            start, num_known = int(self.cache.num_valid_S[slot]), int(self.cache.num_known_S[slot])
            num_rows = min(num_known - start, room)
            if self.cache.states:  # parts that depend on this request alone, and the last token is always decoded
                num_rows = min(num_known - start - 1, self.max_step_tokens)
            if not num_rows:
                break
            extends.append((slot, start, num_rows))
            slot_parts.append(np.full(num_rows, slot, np.int64))
            position_parts.append(np.arange(start, start + num_rows))
            room, row = room - num_rows, row + num_rows
            if start + num_rows == num_known:
                last_rows.append(row - 1)
        slot_N, position_N = np.concatenate(slot_parts), np.concatenate(position_parts)
        return Rows(slot_N, position_N, len(decode), tuple(extends), np.array(last_rows, np.int64))

    def _share(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copies prefixes into fresh slots; leaves out slots that gain by waiting for a prefix being computed."""
        late = []
        reading = np.zeros(self.cache.num_slots, bool)
        reading[[slot for slot in slots.tolist() if not self.active[slot].fresh]] = True
        for slot in slots.tolist():
            request = self.active[slot]
            if not request.fresh:
                continue
            if self._waits(request, reading):
                late.append(slot)
            else:
                request.fresh, reading[slot] = False, True
                self._num_fresh -= 1
        return slots[~np.isin(slots, late)] if late else slots

    def _waits(self, request: SamplingRequest, reading: NDArray[np.bool_]) -> bool:
        """Copies a prefix that is there; returns True if a longer one is worth a wait."""
        cache, slot, awaited = self.cache, request.slot, request.awaited
        if awaited is not None and self._is_computing(awaited):
            return True
        request.awaited = None
        limit, worth = int(cache.num_known_S[slot]) - 1, int(cache.num_valid_S[slot]) + _MIN_SHARED
        if worth > limit:
            return False
        shared_S = np.minimum(cache.common_prefix_S(slot, worth), limit)
        ready_S = np.minimum(shared_S, cache.num_valid_S)
        if cache.states:  # a prefix can be continued only where it ends
            ready_S[ready_S < cache.num_valid_S] = 0
            shared_S[shared_S < cache.num_known_S - 1] = 0
        source, computing = int(ready_S.argmax()), int((shared_S * reading).argmax())
        ready, soon = int(ready_S[source]), int(shared_S[computing] * reading[computing])
        if soon - max(ready, int(cache.num_valid_S[slot])) >= _MIN_SHARED:
            request.awaited = Prefix(self.active[computing], soon)
            return True
        if ready > cache.num_valid_S[slot] and cache.shares(source, slot, ready):
            cache.copy_prefix(source, slot, ready)
        return False

    def _is_computing(self, prefix: Prefix) -> bool:
        """Returns whether most of a prefix is still to be computed by the request that began it."""
        slot = prefix.request.slot
        return (
            self.active.get(slot) is prefix.request and prefix.num_tokens - self.cache.num_valid_S[slot] >= _MIN_SHARED
        )

    def commit(
        self, rows: Rows, id_R: NDArray[np.int64], logprob_R: NDArray[np.float32], version: int
    ) -> list[SamplingRequest]:
        """Stores the sampled tokens; returns the requests that they end, which are no longer active."""
        cache = self.cache
        cache.num_valid_S[rows.slot_N[: rows.num_decode]] += 1
        for slot, start, num_rows in rows.extends:
            cache.num_valid_S[slot] = start + num_rows
        slot_R = rows.slot_N[rows.output_R]
        num_known_R = cache.num_known_S[slot_R]
        self._logprob_SW[slot_R, num_known_R] = logprob_R
        self._version_SW[slot_R, num_known_R] = version
        cache.append(slot_R, id_R)
        ended_R = (num_known_R + 1 == self._end_S[slot_R]) | (self._stop_SJ[slot_R] == id_R[:, None]).any(1)
        for row in np.flatnonzero(self._reads_text_S[slot_R] & ~ended_R).tolist():
            ended_R[row] = self._has_stop(self.active[int(slot_R[row])])
        return [self._leave(slot) for slot in slot_R[ended_R].tolist()] if ended_R.any() else []

    def _has_stop(self, request: SamplingRequest) -> bool:
        """Returns whether the newest id completes a stop string."""
        slot, sampling = request.slot, request.sampling
        assert sampling.decode is not None
        key = int(self.cache.tokens_SW[slot, self.cache.num_known_S[slot] - 1]), sampling.stop
        if len(self._may_end) > _MAX_KNOWN:
            self._may_end.clear()
        if key not in self._may_end:
            self._may_end[key] = may_end_stop(*key, sampling.decode)
        if not self._may_end[key]:
            return False
        ids = self.cache.tokens_SW[slot, len(request.prompt_T) : self.cache.num_known_S[slot]].tolist()
        return ends_with_stop(ids, sampling.stop, sampling.decode)

    def with_penalties(self, logits_RV: Tensor, slot_R: NDArray[np.int64]) -> Tensor:
        """Returns the logits, with the penalties of the requests that have some."""
        if not self._penalizes_S[slot_R].any():
            return logits_RV
        logits_RV = logits_RV.float().clone()
        for row in np.flatnonzero(self._penalizes_S[slot_R]).tolist():
            slot = int(slot_R[row])
            request, ids_T = self.active[slot], self.cache.tokens_SW[slot, : self.cache.num_known_S[slot]]
            penalize(logits_RV[row], ids_T, len(request.prompt_T), request.sampling)
        return logits_RV

    def uniform_R(self, slot_R: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the random number of each slot's next token."""
        return self._uniform_SW[slot_R, self.cache.num_known_S[slot_R]]

    def completion(self, request: SamplingRequest, reason: FinishReason | None = None) -> Completion:
        """Returns what the request has sampled so far; without a reason, it ended by itself: `stop` or `length`."""
        if request.slot < 0:
            return Completion((), (), (), reason or "abort")
        slot, start, stop = request.slot, len(request.prompt_T), int(self.cache.num_known_S[request.slot])
        ids = tuple(self.cache.tokens_SW[slot, start:stop].tolist())
        return Completion(
            ids,
            tuple(self._logprob_SW[slot, start:stop].tolist()),
            tuple(self._version_SW[slot, start:stop].tolist()),
            reason or ("length" if stop == self._end_S[slot] and ids[-1] not in request.sampling.stop_ids else "stop"),
            self._experts(slot),
        )

    def _experts(self, slot: int) -> RoutedExperts | None:
        """Returns the experts of a slot's tokens, where they are recorded."""
        experts_SWRK, num_tokens = self.cache.experts_SWRK, int(self.cache.num_valid_S[slot])
        return None if experts_SWRK is None else RoutedExperts.of(experts_SWRK[slot, :num_tokens])

    def end(self, request: SamplingRequest) -> None:
        """Removes a request before it ended by itself."""
        if request.slot < 0:
            del self.waiting[request.session]
        else:
            self._leave(request.slot)

    def restart(self) -> None:
        """Marks all keys as stale: every active request reads its tokens again, sharing prefixes as at the start."""
        self.cache.invalidate()
        for request in self.active.values():
            request.fresh, request.awaited = True, None
        self._num_fresh = len(self.active)

    def _leave(self, slot: int) -> SamplingRequest:
        request = self.active.pop(slot)
        self._num_fresh -= request.fresh
        self._slots = None
        self.cache.rest(slot, time.monotonic())
        return request
