"""`/generate` of a fake SGLang server: requests are read and refused, and replies sampled, as by the real one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import Reply
from agentgym.testing.fake_server.faults import FaultKind, FaultPlan, Faults
from agentgym.testing.fake_server.model import FakeModel
from agentgym.testing.fake_server.sampler import DuplicateRequest, FakeSampler, Flight
from agentgym.testing.fake_server.script import plan_reply

__all__ = [
    "Dropped",
    "FakeStats",
    "GenerateRequest",
    "Generator",
    "HttpError",
    "Killed",
    "PlayedReply",
    "read_generate_request",
]

RESERVED_TOKENS = 6
"""The tokens that the real server reserves in its window: a prompt is shorter than window - 6."""
DEFAULT_NEW_TOKENS = 128
STREAM_ABORT_S = 2.0
"""The seconds after the end of a stream at which the real server aborts its request id, in case the client left."""
KNOWN_PARAMS = (
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty"
    " repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens"
    " spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params beam_width"
    " watermark choice"
).split()
UNPLAYED = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "beam_width")
SCRIPTED: Mapping[str, FaultKind] = {"raise": "error", "hang": "hang", "abort": "abort", "lengths": "lengths"}
NUM_FAULTED = 10_000


class HttpError(Exception):
    """The answer is an error."""

    def __init__(self, status: int, body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(str(body))
        self.status, self.body, self.headers = status, body, dict(headers or {})

    @staticmethod
    def bad(message: str) -> HttpError:
        """Returns a refusal of status 400, in the words of the native endpoints."""
        return HttpError(400, {"error": {"message": message}})


class Dropped(Exception):
    """The connection has to close in the middle of `answer`."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__("dropped")
        self.answer = answer


class Killed(Exception):
    """The server has to end now."""


@dataclass(kw_only=True, slots=True)
class FakeStats:
    """The counts of a fake server, as `GET /fake/stats` returns them."""

    requests: int = 0
    """The number of requested generations, whatever their outcome."""
    answered: int = 0
    """The number of complete answers; those ended by an abort count."""
    tokens: int = 0
    """The number of ids in those answers."""
    prompt_tokens: int = 0
    aborted: int = 0
    """The number of answers ended by an abort."""
    refused: int = 0
    """The number of invalid requests (status 400)."""
    left: int = 0
    """The number of requests whose client closed the connection."""
    in_flight: int = 0
    most_in_flight: int = 0
    sessions: dict[str, int] = field(default_factory=dict)
    """The number of requests by session, the part of a request id before the last `#`."""
    duplicates: int = 0
    """The number of requests under a request id that was used before."""
    prompts: int = 0
    """The number of different prompts."""
    faults: dict[FaultKind, int] = field(default_factory=dict)
    """The number of faults by kind."""
    faulted: tuple[tuple[str, FaultKind], ...] = ()
    """The request id and kind of the last 10,000 faults."""
    version: str = ""
    """The weight version of the next id."""
    updates: int = 0
    """The number of weight updates that succeeded; each bucket counts."""
    tensors: int = 0
    """The number of received tensors."""
    payload_digests: tuple[str, ...] = ()
    """The SHA-256 of each received payload, hex."""
    adapters: tuple[str, ...] = ()
    """The loaded LoRA adapters."""
    released: tuple[str, ...] = ()
    """The parts of the memory that are released now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """A request that the real server would accept."""

    rid: str
    session: str
    ids: Sequence[int]
    sampling: Sampling
    end_ids: tuple[int, ...]
    with_logprobs: bool = False
    skip_special: bool = True
    keeps_stop: bool = False
    """True if the text keeps a stop string that ended the reply."""
    text_in_logprobs: bool = False


def read_generate_request(body: Mapping[str, Any], model: FakeModel) -> GenerateRequest:
    """Returns the request in a body of `/generate`; raises HttpError in the real server's words if it is invalid."""
    ids, params = body.get("input_ids"), body.get("sampling_params") or {}
    if ids is None and isinstance(body.get("text"), str):
        ids = model.encode(body["text"])
    if ids is None:
        raise HttpError.bad("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        message = "1 validation error: {'loc': ('body', 'input_ids'), 'msg': 'a list of integers was wanted'}"
        raise HttpError(400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})
    for name in params:
        if name not in KNOWN_PARAMS:
            names = ", ".join(f"`{param}`" for param in KNOWN_PARAMS)
            raise HttpError(400, {"error": f"unknown field `{name}`, expected one of {names}"})
    for name in UNPLAYED:
        if params.get(name):
            raise HttpError.bad(
                f"the fake server does not play {name!r}: end replies by stop_token_ids, or leave it out"
            )
    num_new = params.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    _check_lengths(len(ids), num_new, model.context_window)
    stops = tuple(params.get("stop_token_ids") or ())
    return GenerateRequest(
        rid=(rid := body.get("rid") or uuid.uuid4().hex),
        session=body.get("session") or request_session(rid),
        ids=ids,
        sampling=Sampling(
            max_tokens=max(num_new, 1),
            stop_ids=stops,
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(int(params.get("top_k", 0)), 0),
            seed=int(params.get("sampling_seed") or 0),
            stop=params.get("stop") or (),
            decode=partial(model.decode, skip_special=False),
        ),
        end_ids=() if params.get("ignore_eos") else tuple(dict.fromkeys((*stops, *model.eos_ids))),
        with_logprobs=bool(body.get("return_logprob")),
        skip_special=bool(params.get("skip_special_tokens", True)),
        keeps_stop=bool(params.get("no_stop_trim")),
        text_in_logprobs=bool(body.get("return_text_in_logprobs")),
    )


def _check_lengths(num_ids: int, num_new: int, window: int) -> None:
    if not num_ids:
        raise HttpError.bad("input_ids cannot be empty.")
    if num_new < 0:
        raise HttpError.bad(f"max_new_tokens must be at least 0, got {num_new}.")
    if num_ids >= window:
        raise HttpError.bad(
            f"The input ({num_ids} tokens) is longer than the model's context length ({window} tokens)."
        )
    if num_ids + num_new > window:
        raise HttpError.bad(
            f"Requested token count exceeds the model's maximum context length of {window} tokens. You requested a"
            f" total of {num_ids + num_new} tokens: {num_ids} tokens from the input messages and {num_new} tokens for"
            " the completion. Please reduce the number of tokens in the input messages or the completion to fit within"
            " the limit."
        )
    if num_ids >= window - RESERVED_TOKENS:
        raise HttpError.bad(
            f"Input length ({num_ids} tokens) exceeds the maximum allowed length ({window - RESERVED_TOKENS} tokens)."
            " Use a shorter input or enable --allow-auto-truncate."
        )


@dataclass(slots=True)
class PlayedReply:
    """A reply that is being made into an answer."""

    request: GenerateRequest
    flight: Flight
    logprobs: Sequence[float]
    fault: FaultKind | None
    model: FakeModel
    started: float

    def answer(self, num_out: int, *, finished: bool = True) -> dict[str, Any]:
        """Returns the answer with the first `num_out` ids, in the fields of the real server."""
        request, flight = self.request, self.flight
        ids, finish = list(flight.ids[:num_out]), self._finish(num_out) if finished else None
        logprobs = list(self.logprobs[:num_out])
        if self.fault == "vocabulary" and ids:
            ids[-1] = self.model.vocab_size
        matched = finish.get("matched") if finish is not None else None
        text = self.model.decode(ids[:-1] if isinstance(matched, int) else ids, skip_special=request.skip_special)
        if isinstance(matched, str) and matched in text:
            text = text.partition(matched)[0] + (matched if request.keeps_stop else "")
        meta: dict[str, Any] = {"id": request.rid, "finish_reason": finish}
        if not flight.dropped_from_queue:
            meta |= {"prompt_tokens": len(request.ids), "num_retractions": 0}
        if request.with_logprobs:
            rows = zip(logprobs[:-1] if self.fault == "lengths" and finished else logprobs, ids, strict=False)
            words = (
                [self.model.decode([token], skip_special=False) for token in ids] if request.text_in_logprobs else ()
            )
            pairs = [[logprob, token, words[index] if words else None] for index, (logprob, token) in enumerate(rows)]
            meta |= {"input_token_logprobs": [], "output_token_logprobs": pairs}
            meta["output_token_logprobs_length"] = len(pairs)
        meta["completion_tokens"] = len(ids)
        if not flight.dropped_from_queue:
            meta |= {"reasoning_tokens": 0, "cached_tokens": 0, "dp_rank": None}
            meta["cached_tokens_details"] = {"device": 0, "host": 0}
        if finished:
            spans = flight.spans()
            meta |= {"weight_version": spans[-1]["version"], "weight_versions": spans}
            meta["e2e_latency"] = time.perf_counter() - self.started
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _finish(self, num_out: int) -> dict[str, Any]:
        flight = self.flight
        if flight.abort is not None:
            return flight.abort
        if self.fault == "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if num_out and flight.ids[num_out - 1] in self.request.end_ids:
            return {"type": "stop", "matched": flight.ids[num_out - 1]}
        if match := self.request.sampling.find_stop(flight.ids[:num_out]):
            return {"type": "stop", "matched": match[1]}
        return {"type": "length", "length": num_out}


class Generator:
    """Replies to generation requests, sequentially or thousands at once."""

    def __init__(
        self,
        model: FakeModel,
        sampler: FakeSampler,
        reply: Reply,
        *,
        delay_s: Callable[[], float],
        token_s: float,
        faults: Faults,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.stats = FakeStats()
        """The counts of requests and answers; `FakeServer.stats` completes them."""
        self.faulted: deque[tuple[str, FaultKind]] = deque(maxlen=NUM_FAULTED)
        """The request id and kind of the last faults."""
        self._rids: set[str] = set()
        self._prompts: set[int] = set()
        self._reply = reply
        self._delay_s = delay_s
        self._token_s = token_s
        self._plan = FaultPlan(faults)

    @property
    def faults(self) -> Faults:
        """The faults from now on."""
        return self._plan.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._plan = FaultPlan(faults)

    async def start(self, request: GenerateRequest) -> PlayedReply:
        """Begins the reply, once sampling is allowed; raises HttpError, or Killed for an id outside the vocabulary."""
        fault = self._count(request)
        if fault == "error":
            message = "the fake server was asked for this error"
            raise HttpError(500, {"object": "error", "message": message, "type": "InternalServerError", "code": 500})
        if fault == "busy":
            seconds = f"{self.faults.retry_after_s:g}"
            raise HttpError(429, {"error": {"message": "Too many requests"}}, {"Retry-After": seconds})
        if not 0 <= min(request.ids) <= max(request.ids) < self.model.vocab_size:
            raise Killed(f"the request {request.rid!r} has an id outside of [0, {self.model.vocab_size})")
        run = self._plan_run(request, fault)
        try:
            await self.sampler.admit(run.flight)
        except DuplicateRequest as error:
            raise HttpError.bad(str(error)) from error
        self.stats.most_in_flight = max(self.stats.most_in_flight, self.sampler.num_in_flight)
        return run

    async def whole(self, run: PlayedReply) -> dict[str, Any]:
        """Returns the answer when the reply is out; raises Dropped or Killed."""
        await self.sampler.land(run.flight)
        answer = run.answer(run.flight.num_out)
        if run.fault == "die":
            raise Killed("the faults asked for it")
        if run.fault == "drop":
            raise Dropped(answer)
        self._count_answer(run)
        return answer

    async def pieces(self, run: PlayedReply) -> AsyncIterator[dict[str, Any]]:
        """Yields the answer after each id, the last one with a finish reason; raises Dropped or Killed half way.

        As on the real server, a request with the same id is aborted two seconds later.
        """
        half = len(run.flight.ids) // 2
        try:
            async for num_out in self.sampler.pieces(run.flight):
                if num_out >= half and run.fault == "die":
                    raise Killed("the faults asked for it")
                if num_out >= half and run.fault == "drop":
                    raise Dropped(run.answer(num_out, finished=False))
                yield run.answer(num_out, finished=False)
        finally:
            asyncio.get_running_loop().call_later(STREAM_ABORT_S, self.sampler.abort, run.request.rid)
        if run.fault in ("die", "drop"):
            raise Killed("the faults asked for it") if run.fault == "die" else Dropped({})
        self._count_answer(run)
        yield run.answer(run.flight.num_out)

    def _plan_run(self, request: GenerateRequest, fault: FaultKind | None) -> PlayedReply:
        sampling = request.sampling
        planned = plan_reply(self._reply(request.session, request.ids, sampling), sampling, request.end_ids)
        if planned.fault is not None and fault is None:
            fault = self._record(request.rid, SCRIPTED[planned.fault])
            if fault == "error":
                raise HttpError(500, {"object": "error", "message": "the script asks for this error", "code": 500})
        ids = tuple(planned.ids)
        if match := sampling.find_stop(ids):
            ids = ids[: match[0]]
        if fault == "abort":
            ids = ids[: len(ids) // 2]
        factor = self.faults.slow_factor
        delay_s = (self._delay_s() + planned.delay_s) * factor
        flight = Flight(request.rid, ids, delay_s, self._token_s * factor, hangs=fault == "hang")
        return PlayedReply(request, flight, planned.logprobs or (), fault, self.model, time.perf_counter())

    def _count(self, request: GenerateRequest) -> FaultKind | None:
        stats, session = self.stats, request.session
        stats.requests += 1
        stats.prompt_tokens += len(request.ids)
        stats.sessions[session] = stats.sessions.get(session, 0) + 1
        stats.duplicates += request.rid in self._rids
        self._rids.add(request.rid)
        self._prompts.add(hash(tuple(request.ids)))
        stats.prompts = len(self._prompts)
        fault = self._plan.next()
        return None if fault is None else self._record(request.rid, fault)

    def _record(self, rid: str, fault: FaultKind) -> FaultKind:
        self.stats.faults[fault] = self.stats.faults.get(fault, 0) + 1
        self.faulted.append((rid, fault))
        return fault

    def _count_answer(self, run: PlayedReply) -> None:
        self.stats.answered += 1
        self.stats.tokens += run.flight.num_out
        self.stats.aborted += run.flight.abort is not None


def request_session(rid: str) -> str:
    """Returns the session of a request id: the part before its last `#`, or all of it."""
    return rid.rpartition("#")[0] or rid
