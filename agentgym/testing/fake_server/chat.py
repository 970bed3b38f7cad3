"""`/v1/chat/completions` of a fake server: the conversation rendered, a scripted reply, its tool calls parsed."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentgym.errors import AgentGymError
from agentgym.testing.fake_server.generate import (
    Dropped,
    GenerateRequest,
    Generator,
    HttpError,
    PlayedReply,
    read_generate_request,
)
from agentgym.testing.fake_server.http import HttpAnswer, HttpCall, HttpStream
from agentgym.testing.fake_server.model import FakeModel
from agentgym.types import AnyCall, MalformedCall, Message, ToolCall, ToolSpec
from agentgym.yaml_text import check_size

__all__ = ["FakeChat"]

NOT_STREAMED = ("return_prompt_token_ids", "return_token_ids", "return_meta_info")
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "stop", "no_stop_trim", "stop_token_ids", "ignore_eos")


@dataclass(frozen=True, slots=True)
class _Chat:
    """A parsed chat request."""

    request: GenerateRequest
    model: str
    has_tools: bool
    body: Mapping[str, Any]


class FakeChat:
    """Chat completions over a `Generator`; calls are parsed if tools are given, as with `--tool-call-parser`."""

    def __init__(self, model: FakeModel, generator: Generator) -> None:
        self._model = model
        self._generator = generator

    async def complete(self, call: HttpCall) -> HttpAnswer | HttpStream:
        """Answers a request to the endpoint; raises HttpError."""
        try:
            chat = self._read(call.body)
            run = await self._generator.start(chat.request)
        except HttpError as refused:
            raise _in_openai_words(refused) from refused
        if call.body.get("stream"):
            return HttpStream(self._events(chat, run))
        try:
            return HttpAnswer(self._whole(chat, await self._generator.whole(run)))
        except Dropped as dropped:
            raise Dropped(self._whole(chat, dropped.answer)) from dropped

    def _read(self, body: Mapping[str, Any]) -> _Chat:
        listed, tools = body.get("messages"), body.get("tools") or ()
        if not listed:
            raise HttpError.bad("Messages cannot be empty.")
        for name in NOT_STREAMED:
            if body.get("stream") and body.get(name):
                raise HttpError.bad(
                    f"{name} is not supported with streaming. Please set stream=false when using {name}=true."
                )
        try:
            specs = [_tool_spec(tool) for tool in tools] if body.get("tool_choice") != "none" else []
            ids = self._model.renderer.render([_message(entry) for entry in listed], specs)
        except (AgentGymError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise HttpError.bad(f"messages or tools cannot be read: {type(error).__name__}: {error}") from error
        room = max(self._model.context_window - len(ids) - 6, 1)
        num_new = body.get("max_completion_tokens") or body.get("max_tokens") or room
        params = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
        rid = body.get("rid") or uuid.uuid4().hex
        native = {
            "input_ids": ids,
            "rid": rid,
            "session": body.get("user") or (None if body.get("rid") else "chat"),
            "sampling_params": params | {"max_new_tokens": num_new, "sampling_seed": body.get("seed")},
            "return_logprob": True,
            "return_text_in_logprobs": True,
        }
        request = read_generate_request(native, self._model)
        return _Chat(request, str(body.get("model", "")), bool(specs), body)

    def _whole(self, chat: _Chat, answer: Mapping[str, Any]) -> dict[str, Any]:
        body, meta = chat.body, answer["meta_info"]
        text, calls = self._content_and_calls(chat, answer)
        message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": None}
        if calls:
            message["tool_calls"] = calls
        reason, matched = _reason(meta["finish_reason"], bool(calls))
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason, "matched_stop": matched}
        choice["logprobs"] = {"content": _logprobs(meta)} if body.get("logprobs") else None
        if body.get("return_prompt_token_ids") or body.get("return_token_ids"):
            choice["prompt_token_ids"] = list(chat.request.ids)
        if body.get("return_token_ids"):
            choice["response_token_ids"] = answer["output_ids"]
        if body.get("return_meta_info"):
            choice["meta_info"] = meta
        versions = {name: meta[name] for name in ("weight_version", "weight_versions")}
        head = _head(chat, "chat.completion")
        return head | {"choices": [choice], "usage": _usage(chat, answer), "metadata": versions}

    def _content_and_calls(self, chat: _Chat, answer: Mapping[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
        """Returns the reply's content and calls; if a call cannot be read, all is content, as on a real server."""
        if not chat.has_tools:
            return answer["text"], []
        message = self._model.renderer.parse(answer["output_ids"], (), chat.request.ids)
        calls = [call for call in message.tool_calls if isinstance(call, ToolCall)]
        if not calls or len(calls) < len(message.tool_calls):
            return answer["text"], []
        wire_calls = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "index": index,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for index, call in enumerate(calls)
        ]
        return message.content or None, wire_calls

    async def _events(self, chat: _Chat, run: PlayedReply) -> AsyncIterator[str | None]:
        text_so_far, answer = "", {}
        yield _chunk(chat, {"role": "assistant", "content": ""})
        try:
            async for answer in self._generator.pieces(run):
                text = answer["text"]
                if not chat.has_tools and len(text) > len(text_so_far) and not text.endswith("\ufffd"):
                    yield _chunk(chat, {"content": text[len(text_so_far) :]})
                    text_so_far = text
        except Dropped:
            yield None
            return
        text, calls = self._content_and_calls(chat, answer)
        if text and len(text) > len(text_so_far):
            yield _chunk(chat, {"content": text[len(text_so_far) :]})
        for call in calls:
            yield _chunk(chat, {"tool_calls": [call]})
        reason, matched = _reason(answer["meta_info"]["finish_reason"], bool(calls))
        yield _chunk(chat, {}, reason, matched)
        if (chat.body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": _usage(chat, answer)}
            yield json.dumps(_head(chat, "chat.completion.chunk") | usage)
        yield "[DONE]"


def _head(chat: _Chat, kind: str) -> dict[str, Any]:
    return {"id": chat.request.rid, "object": kind, "created": int(time.time()), "model": chat.model}


def _chunk(chat: _Chat, delta: Mapping[str, Any], reason: str | None = None, matched: object = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": matched}
    return json.dumps(_head(chat, "chat.completion.chunk") | {"choices": [choice]})


def _reason(finish: Mapping[str, Any], has_calls: bool) -> tuple[str, object]:
    """Returns `finish_reason` and `matched_stop`."""
    if has_calls and finish["type"] == "stop":
        return "tool_calls", None
    return finish["type"], finish.get("matched")


def _usage(chat: _Chat, answer: Mapping[str, Any]) -> dict[str, Any]:
    num_prompt, num_new = len(chat.request.ids), len(answer["output_ids"])
    counted = {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_new, "completion_tokens": num_new}
    return counted | {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}


def _logprobs(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for logprob, _, text in meta["output_token_logprobs"]
    ]


def _in_openai_words(refused: HttpError) -> HttpError:
    error = refused.body.get("error")
    if not isinstance(error, Mapping):
        return refused
    kind = "BadRequestError" if refused.status == 400 else "RateLimitError"
    body = {"object": "error", "message": error["message"], "type": kind, "param": None, "code": refused.status}
    return HttpError(refused.status, body, refused.headers)


def _message(entry: Mapping[str, Any]) -> Message:
    content = entry.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = tuple(_call(call) for call in entry.get("tool_calls") or ())
    reasoning = entry.get("reasoning_content")
    return Message(entry["role"], content, reasoning, calls, entry.get("tool_call_id"))


def _call(entry: Mapping[str, Any]) -> AnyCall:
    function = entry["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
        check_size(arguments)
        return ToolCall(entry.get("id", ""), function["name"], arguments)
    except (ValueError, TypeError, RecursionError) as error:
        return MalformedCall(entry.get("id", ""), str(function["arguments"]), str(error))


def _tool_spec(entry: Mapping[str, Any]) -> ToolSpec:
    function = entry["function"]
    return ToolSpec(function["name"], function.get("description") or "", function.get("parameters") or {})
