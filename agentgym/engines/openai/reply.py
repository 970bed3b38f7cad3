"""Reads the answer of a chat endpoint, a whole completion or its chunks, into one reply."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.engines.openai.errors import WITHHELD
from agentgym.engines.openai.finish_reasons import classify_finish
from agentgym.engines.openai.stream_calls import CallDraft, add_calls
from agentgym.engines.protocol import FinishReason
from agentgym.engines.servers.http import DONE, HttpRefusal, HttpUnreachable
from agentgym.engines.servers.retry_after import retry_after_s
from agentgym.errors import EngineError
from agentgym.openai_wire import MALFORMED, WireError, is_thought, message_from_openai, reasoning_texts
from agentgym.types import JSON, MalformedCall, Message

__all__ = ["ChatCompletionReader", "ChatReply", "Usage"]


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
    failures: Mapping[str, int] = field(default_factory=dict)
    """The number of requests without a reply that were sent before it, by cause."""
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

    @property
    def attempts(self) -> int:
        """The number of requests that were sent for it."""
        return 1 + sum(self.failures.values())


class ChatCompletionReader:
    """Takes a completion whole, or its chunks one after the other."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._num_events = 0
        self._content: list[str] = []
        self._reasoning: dict[str, str] = {}
        self._calls: list[CallDraft] = []
        self._finish: str | None = None
        self._is_whole = False
        self._stop: object = None
        self._usage: Mapping[str, Any] | None = None
        self._meta: Mapping[str, Any] = {}
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self.remark = ""
        """The remark that the user should read once about the endpoint, such as `gives no finish reason: ...`."""

    @property
    def num_events(self) -> int:
        """The number of events taken so far."""
        return self._num_events

    def take(self, event: object) -> None:
        """Reads one event; raises HttpRefusal for an error in the stream, HttpUnreachable for no event.

        DONE says that the answer is whole.
        """
        if event == DONE:
            self._is_whole = True
            return
        self._num_events += 1
        if not isinstance(event, Mapping):
            raise HttpUnreachable(f"the endpoint sent what is not a completion: {str(event)[:200]}")
        error = event.get("error")
        if error and not event.get("choices"):
            raise _refusal(error)
        self._usage = event.get("usage") or self._usage
        self._prompt_ids = event.get("prompt_token_ids") or self._prompt_ids
        choices = event.get("choices")
        if choices and not choices[0].get("index"):
            self._take_choice(choices[0])

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta")
        message: Mapping[str, Any] = delta or choice.get("message") or {}
        reasoning = {name: text for name, text in reasoning_texts(message).items() if text}
        content = _text(message.get("content") or message.get("refusal"))
        self._content.append(content)
        for name, text in reasoning.items():  # some servers send it under two names
            self._reasoning[name] = self._reasoning.get(name, "") + text
        calls = add_calls(self._calls, message, in_stream=delta is not None)
        if delta is not None and self._first_token_s is None and (content or reasoning or calls):
            self._first_token_s = time.perf_counter() - self._start_s
        if classify_finish(choice.get("finish_reason"))[0]:
            self._finish = str(choice["finish_reason"])
        self._stop = choice.get("stop_reason") or choice.get("matched_stop") or self._stop  # vLLM's, SGLang's
        self._meta = choice.get("meta_info") or self._meta
        self._prompt_ids = choice.get("prompt_token_ids") or self._prompt_ids
        self._ids += choice.get("token_ids") or choice.get("response_token_ids") or ()
        self._logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]

    def finish(self, max_tokens: int | None = None) -> ChatReply:
        """Returns the reply; raises HttpUnreachable if it is incomplete, EngineError if it is not a message.

        A reply that a content filter withheld is an HttpRefusal. `max_tokens` are those that were asked for.
        """
        is_cut = self._is_cut(max_tokens)
        latency_s = time.perf_counter() - self._start_s
        wire = self._wire()
        try:
            message = message_from_openai({**wire, "reasoning": max(self._reasoning.values(), key=len, default=None)})
        except WireError as error:
            raise EngineError(f"the endpoint's reply cannot be read: {error}") from error
        ids, logprobs = self._sampled_tokens()
        return ChatReply(
            message=message,
            said=_sendable(wire, message),
            finish_reason="length" if is_cut else "stop",
            usage=self._read_usage(),
            latency_s=latency_s,
            first_token_s=self._first_token_s,
            prompt_ids=tuple(self._prompt_ids) if ids and self._prompt_ids else None,
            ids=ids,
            logprobs=logprobs,
            stop=self._stop if isinstance(self._stop, str) else "",
        )

    def _is_cut(self, max_tokens: int | None) -> bool:
        """Returns whether the reply was cut; raises if it is incomplete or was withheld."""
        kind, is_known = classify_finish(self._finish)
        used_all = max_tokens is not None and self._read_usage().completion_tokens >= max_tokens
        if kind is None:
            if not self._is_whole or not (used_all or any(self._content) or self._reasoning or self._calls):
                raise HttpUnreachable("the endpoint's answer ended before the reply did")
            self.remark = "gives no finish reason: a reply is taken if the answer is whole and not empty"
            return used_all
        if not is_known:
            self.remark = f"ended a reply with the unknown finish reason {self._finish!r:.80}: taken as {kind}"
        if kind == "failed":
            raise HttpRefusal(f"the endpoint gave the reply up (finish reason {self._finish})", status=500)
        if kind == "filtered":
            raise HttpRefusal(f"the reply was withheld (finish reason {self._finish})", WITHHELD)
        return kind == "cut"

    def _wire(self) -> dict[str, Any]:
        """Returns the assistant message in the format of chat completions."""
        drafts, content = sorted(self._calls, key=lambda call: call.index or 0), "".join(self._content)
        calls = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {**call.unknown, "name": call.name, "arguments": "".join(call.pieces)},
            }
            for index, call in enumerate(drafts)
        ]
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
        return "".join(
            part if isinstance(part, str) else str(part.get("text", "")) for part in content if not is_thought(part)
        )
    return str(content or "")


def _sendable(wire: dict[str, Any], message: Message) -> Mapping[str, JSON]:
    """Returns the reply as part of a history.

    Arguments that are not JSON, which servers refuse, are sent as text of a call.
    """
    calls = wire.get("tool_calls")
    if not calls:
        return wire
    sendable = []
    for call, parsed_call in zip(calls, message.tool_calls, strict=True):
        if isinstance(parsed_call, MalformedCall):
            arguments = json.dumps({"raw": parsed_call.raw, "error": parsed_call.error})
            call = {**call, "function": {"name": MALFORMED, "arguments": arguments}}
        elif not parsed_call.arguments:
            call = {**call, "function": {**call["function"], "arguments": "{}"}}
        sendable.append(call)
    return {**wire, "tool_calls": sendable}


def _refusal(error: object) -> HttpRefusal:
    """Returns a server's error in mid-stream, when its status was already sent."""
    details = error if isinstance(error, Mapping) else {"message": error}
    code, body = details.get("code"), json.dumps(error)
    status = code if isinstance(code, int) else int(code) if isinstance(code, str) and code.isdigit() else 500
    words = f"the endpoint answered {status} in its stream: {str(details.get('message'))[:500]}"
    return HttpRefusal(words, status, retry_after_s({}, body), body)
