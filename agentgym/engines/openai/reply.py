"""Reads the answer of a chat endpoint, a whole completion or its chunks, into one reply."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.engines.protocol import FinishReason
from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable
from agentgym.errors import EngineError
from agentgym.openai_wire import MALFORMED, WireError, message_from_openai
from agentgym.types import JSON, MalformedCall, Message

__all__ = ["ChatCompletionReader", "ChatReply", "Usage"]

CUT = ("length", "max_tokens")
"""The finish reasons of endpoints for a reply that was cut; every other finish is a `stop`."""

GIVEN_UP = ("abort", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The tokens of one answered request, as the endpoint counts them; failed requests are not included."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The prompt tokens that the endpoint had cached."""
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """One reply of a chat endpoint."""

    message: Message
    """The reply, malformed calls kept, under the endpoint's own call ids."""
    said: Mapping[str, JSON]
    """The same message as the endpoint wrote it, to be sent back as part of the history."""
    finish_reason: FinishReason
    """`stop` or `length`."""
    usage: Usage
    latency_s: float
    """Seconds from sending the answered request to its last token; waits and failed requests are not counted."""
    first_token_s: float | None = None
    """Seconds to the first text or call; None without streaming."""
    attempts: int = 1
    """The number of requests that were sent for it."""
    cost: float | None = None
    """The price in the currency of the prices; None if no price is set."""
    cut_by_window: bool = False
    """True if the context window left less than `max_tokens`, so the reply was requested without that limit."""
    prompt_ids: tuple[int, ...] | None = None
    """The ids that the reply was sampled after; None, as are the two below, if the endpoint gives no ids."""
    ids: tuple[int, ...] | None = None
    """The sampled ids, the end token included."""
    logprobs: tuple[float, ...] | None = None
    stop: str = ""
    """The stop string that ended the reply, if the endpoint names it."""


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class ChatCompletionReader:
    """Takes a completion whole, or its chunks one after the other."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first_token_s: float | None = None
        self._num_events = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._finish: str | None = None
        self._stop: object = None
        self._usage: Mapping[str, Any] | None = None
        self._meta: Mapping[str, Any] = {}
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def num_events(self) -> int:
        """The number of events taken so far."""
        return self._num_events

    def take(self, event: object) -> None:
        """Reads one event; raises HttpRefusal for an error in the stream, HttpUnreachable for no event."""
        self._num_events += 1
        if not isinstance(event, Mapping):
            raise HttpUnreachable(f"the endpoint sent what is no completion: {str(event)[:200]}")
        error = event.get("error")
        if error and not event.get("choices"):
            raise _refusal(error)
        self._usage = event.get("usage") or self._usage
        self._prompt_ids = event.get("prompt_token_ids") or self._prompt_ids
        choices = event.get("choices")
        if choices:
            self._take_choice(choices[0])

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta")
        said: Mapping[str, Any] = (choice.get("message") if delta is None else delta) or {}
        reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
        content = _text(said.get("content") or said.get("refusal"))
        self._content.append(content)
        self._reasoning.append(reasoning if isinstance(reasoning, str) else "")
        calls = said.get("tool_calls") or ()
        for place, call in enumerate(calls):
            self._take_call(call, call.get("index", place))
        if delta is not None and self._first_token_s is None and (content or reasoning or calls):
            self._first_token_s = time.perf_counter() - self._started
        self._finish = choice.get("finish_reason") or self._finish
        self._stop = choice.get("stop_reason") or choice.get("matched_stop") or self._stop  # vLLM's, SGLang's
        self._meta = choice.get("meta_info") or self._meta
        self._prompt_ids = choice.get("prompt_token_ids") or self._prompt_ids
        self._ids += choice.get("token_ids") or choice.get("response_token_ids") or ()
        self._logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]

    def _take_call(self, part: Mapping[str, Any], index: int) -> None:
        call = self._calls.setdefault(index, _Call())
        function = part.get("function") or {}
        call.id = call.id or part.get("id") or ""
        call.name = call.name or function.get("name") or ""
        arguments = function.get("arguments")
        if arguments:
            call.arguments.append(arguments if isinstance(arguments, str) else json.dumps(arguments))

    def finish(self) -> ChatReply:
        """Returns the reply; raises HttpUnreachable if it is incomplete, EngineError if it is not a message."""
        if self._finish is None:
            raise HttpUnreachable("the endpoint's answer ended before the reply did")
        if self._finish in GIVEN_UP:
            raise HttpUnreachable(f"the endpoint gave the reply up (finish reason {self._finish})")
        latency_s = time.perf_counter() - self._started
        wire = self._wire()
        try:
            message = message_from_openai({**wire, "reasoning": "".join(self._reasoning) or None})
        except WireError as error:
            raise EngineError(f"the endpoint's reply cannot be read: {error}") from error
        ids, logprobs = self._sampled_tokens()
        return ChatReply(
            message=message,
            said=_sendable(wire, message),
            finish_reason="length" if self._finish in CUT else "stop",
            usage=self._read_usage(),
            latency_s=latency_s,
            first_token_s=self._first_token_s,
            prompt_ids=tuple(self._prompt_ids) if ids and self._prompt_ids else None,
            ids=ids,
            logprobs=logprobs,
            stop=self._stop if isinstance(self._stop, str) else "",
        )

    def _wire(self) -> dict[str, Any]:
        """Returns the assistant message in the format of chat completions."""
        calls = [
            {
                "id": call.id or f"call_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for place, (_, call) in enumerate(sorted(self._calls.items()))
        ]
        content = "".join(self._content)
        wire: dict[str, Any] = {"role": "assistant", "content": content}
        return {**wire, "content": content or None, "tool_calls": calls} if calls else wire

    def _sampled_tokens(self) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
        """Returns ids and logprobs if both are there, of equal length and valid; else neither."""
        whole = self._ids and self._prompt_ids and len(self._ids) == len(self._logprobs)
        if not whole or not all(math.isfinite(value) and value <= 1e-6 for value in self._logprobs):
            return None, None
        return tuple(self._ids), tuple(self._logprobs)

    def _read_usage(self) -> Usage:
        usage = self._usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return Usage(
            prompt_tokens=int(usage.get("prompt_tokens") or len(self._prompt_ids or ())),
            cached_tokens=int(details.get("cached_tokens") or self._meta.get("cached_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or len(self._ids)),
        )


def _text(content: Any) -> str:
    """Returns content as text: it is a string, null, or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _sendable(wire: dict[str, Any], message: Message) -> Mapping[str, JSON]:
    """Returns the reply as part of a history.

    Arguments that are not JSON, which servers refuse, are sent as text of a call.
    """
    calls = wire.get("tool_calls")
    if not calls:
        return wire
    sendable = []
    for call, read in zip(calls, message.tool_calls, strict=True):
        if isinstance(read, MalformedCall):
            arguments = json.dumps({"raw": read.raw, "error": read.error})
            call = {**call, "function": {"name": MALFORMED, "arguments": arguments}}
        elif not call["function"]["arguments"]:
            call = {**call, "function": {**call["function"], "arguments": "{}"}}
        sendable.append(call)
    return {**wire, "tool_calls": sendable}


def _refusal(error: object) -> HttpRefusal:
    """Returns a server's error in mid-stream, when its status was already sent."""
    said = error if isinstance(error, Mapping) else {"message": error}
    code = said.get("code")
    status = code if isinstance(code, int) else int(code) if isinstance(code, str) and code.isdigit() else 500
    return HttpRefusal(f"the endpoint answered {status} in its stream: {str(said.get('message'))[:500]}", status)
