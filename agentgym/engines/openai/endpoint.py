"""Any OpenAI-compatible `/v1/chat/completions`: to be evaluated, or as a user simulator or judge.

A judge inside of an async environment, one client for all of its episodes:

    class Essay(TextEnv):
        judge = ChatEndpoint("http://127.0.0.1:8000/v1")

        async def astep(self, action):
            question = Message("user", f"Rate this text from 0 to 10, with a number alone.\\n\\n{action}")
            reply = await self.judge.complete([question], sampling=Sampling(max_tokens=8, temperature=0.0))
            return "Thank you.", float(reply.message.content) / 10, True, False, {}

A client belongs to one event loop. A sync environment opens one for each question, inside of `asyncio.run`:

    async def ask(question):
        async with ChatEndpoint("http://127.0.0.1:8000/v1") as judge:
            return (await judge.complete([Message("user", question)])).message.content
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from agentgym.engines.openai.backoff import MAX_RETRY_AFTER_S, back_off_s
from agentgym.engines.openai.config import ChatEndpointConfig, endpoint_url
from agentgym.engines.openai.dialect import Dialect
from agentgym.engines.openai.errors import (
    ContextExceeded,
    EndpointFailure,
    cause_of,
    is_transient,
    mistake,
    unknown_model,
)
from agentgym.engines.openai.rate_limit import RateLimit
from agentgym.engines.openai.reply import ChatCompletionReader, ChatReply, Usage
from agentgym.engines.protocol import Sampling
from agentgym.engines.server_kind import SERVERS
from agentgym.engines.servers.http import DONE, MALFORMED, HttpClient, HttpRefusal, HttpUnreachable, connection_slots
from agentgym.errors import AgentGymError, ConfigError
from agentgym.types import Message, ToolSpec

__all__ = ["ChatEndpoint", "ChatEndpointConfig", "ChatReply", "ContextExceeded", "EndpointFailure", "Usage"]

logger = logging.getLogger(__name__)

CHAT, MODELS = "/chat/completions", "/models"
CHARACTERS_PER_TOKEN = 4
"""The estimate that rate limits use until the endpoint reports what a request used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """A question to the endpoint, however often it has to be sent."""

    messages: Sequence[Message | ChatReply]
    tools: Sequence[ToolSpec]
    sampling: Sampling
    session: str

    @property
    def estimated_tokens(self) -> int:
        texts = (len(m.message.content) if isinstance(m, ChatReply) else len(m.content) for m in self.messages)
        return sum(texts) // CHARACTERS_PER_TOKEN + self.sampling.max_tokens

    def fills(self, window: int | None) -> bool:
        """Returns whether the window surely lacks room for `max_tokens`: the last reply's prompt alone left less."""
        last = next((message for message in reversed(self.messages) if isinstance(message, ChatReply)), None)
        return bool(window and last and last.usage.prompt_tokens + self.sampling.max_tokens > window)


class ChatEndpoint:
    """A client of one model that serves chat completions; many requests may be in flight.

    Optional features (token ids, streaming with usage, a seed) are asked for, and given up, once per client, if the
    endpoint refuses them; so are `temperature` and `top_p`, with a warning. Transient failures (429, 5xx, dropped
    connections, time-outs) are retried with back-off: twice as long each time, half of it random by session and
    attempt, and at least as long as `Retry-After` or the words of the refusal ask for.
    """

    def __init__(
        self,
        url: str,
        config: ChatEndpointConfig | None = None,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or ChatEndpointConfig()
        self.url = endpoint_url(url)
        self.model = self.config.model
        self.context_window: int | None = None
        """The most tokens of a prompt with its reply, if the endpoint reports it (after `open`)."""
        key = self.config.api_key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = HttpClient(self.url, headers=headers, timeout_s=self.config.timeout_s, use_proxy=True)
        self._dialect = Dialect.of(self.config)
        self._sleep = sleep
        limits = (self.config.requests_per_minute, self.config.tokens_per_minute)
        self._limit = RateLimit(*limits, sleep=sleep, clock=clock)
        self._first = asyncio.Lock()
        self._has_tried = self._has_answered = False
        self._owner = ""
        self._remarks = {""}

    @property
    def left_out(self) -> tuple[str, ...]:
        """The sampling settings that the model refused: it samples with its own defaults."""
        return self._dialect.left_out

    async def __aenter__(self) -> ChatEndpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; a second call does nothing."""
        await self._http.close()

    async def open(self) -> None:
        """Finds the model among those that the endpoint lists, and its context window.

        Raises EndpointFailure if there is no answer, ConfigError for a key that is refused or a model that has to be
        named, UnknownName for a model that the endpoint does not have.
        """
        models = await self._list_models()
        names = [str(model["id"]) for model in models]
        if self.model is None:
            if len(names) != 1:
                have = f"lists {len(names)}: {', '.join(names[:5])}" if names else "lists no models"
                raise ConfigError(f"{self.url} {have}; name a model with --endpoint.model, or mend the address")
            self.model = names[0]
        elif names and self.model not in names and self.model.partition(":")[0] not in names:
            raise unknown_model(self.url, self.model, names)
        entry = next((model for model in models if model["id"] == self.model), {})
        window = entry.get("max_model_len") or entry.get("context_window") or entry.get("context_length")
        self.context_window = window if isinstance(window, int) else None
        self._owner = str(entry.get("owned_by", ""))

    async def complete(
        self,
        messages: Sequence[Message | ChatReply],
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        *,
        session: str = "",
    ) -> ChatReply:
        """Returns the model's reply; earlier replies may be passed among the messages as their `ChatReply`.

        A `max_tokens` for which the context window has no room is left to the window. Raises ContextExceeded if the
        messages alone do not fit, EndpointFailure after the last retry or if a content filter withholds the reply,
        ConfigError or UnknownName for what a retry cannot fix (key, model, address).
        """
        if self.model is None:
            await self.open()
        question = _Question(
            messages=messages, tools=tools, sampling=sampling or Sampling(max_tokens=1024), session=session
        )
        async with (
            self._first if not self._has_tried else nullcontext()
        ):  # the first request learns for all what the endpoint accepts
            if not self._has_tried:
                return await self._persist_first(question)
        return await self._persist(question)

    async def _persist_first(self, question: _Question) -> ChatReply:
        try:
            return await self._persist(question)
        finally:
            self._has_tried = True

    async def _persist(self, question: _Question) -> ChatReply:
        """Sends the question until it is answered."""
        failures: Counter[str] = Counter()
        num_retries = 0
        max_tokens = None if question.fills(self.context_window) else question.sampling.max_tokens
        while True:
            revision = self._dialect.revision
            try:
                reply = await self._send(question, max_tokens)
                return self._complete_reply(reply, question, failures, cut_by_window=max_tokens is None)
            except (HttpRefusal, HttpUnreachable) as error:
                failure = error
            cause = cause_of(failure)
            if isinstance(failure, HttpRefusal) and cause in ("refused", "content_filter"):
                is_first = not self._has_answered and cause == "refused"
                if self._dialect.adapt(failure, question.sampling, revision=revision, first=is_first):
                    cause = "unsupported_feature"
            failures[cause] += 1
            if cause == "too_many_tokens":
                if max_tokens is None:
                    raise ContextExceeded(self._clean(failure), failures)
                max_tokens = None
            elif cause == "content_filter":
                raise EndpointFailure(f"the endpoint's content filter: {self._clean(failure)}", failures)
            elif isinstance(failure, HttpRefusal) and cause == "refused":
                raise await self._final_error(failure, failures)
            elif cause != "unsupported_feature":
                await self._back_off(failure, question.session, num_retries, failures)
                num_retries += 1

    async def _send(self, question: _Question, max_tokens: int | None) -> ChatReply:
        """Sends one request, within the rate limits, and reads its answer."""
        estimate = question.estimated_tokens if self.config.tokens_per_minute else 0
        await self._limit.acquire(estimate)
        async with connection_slots():
            assert self.model is not None
            body = self._dialect.body(self.model, question.messages, question.tools, question.sampling, max_tokens)
            used = 0
            reader = ChatCompletionReader()
            try:
                if self._dialect.stream:
                    async with aclosing(self._http.stream(CHAT, body, with_done=True)) as events:
                        async for event in events:
                            reader.take(event)
                    if reader.num_events == 0 and not self._has_answered:
                        self._dialect.without_stream()
                        raise HttpRefusal(f"{self.url} does not stream: it answers at once", 400)
                else:
                    reader.take(await self._http.post(CHAT, body))
                    reader.take(DONE)
                reply = reader.finish(max_tokens)
                used = reply.usage.prompt_tokens + reply.usage.completion_tokens
                return reply
            except MALFORMED as error:
                raise EndpointFailure(f"{self.url} answered what is not a chat completion: {error!r}") from error
            finally:
                self._limit.settle(estimate, used)
                if reader.remark not in self._remarks:
                    self._remarks.add(reader.remark)
                    logger.warning("%s %s", self.url, self._clean(reader.remark))

    def _complete_reply(
        self, reply: ChatReply, question: _Question, failures: Mapping[str, int], *, cut_by_window: bool
    ) -> ChatReply:
        usage = reply.usage
        if not self._has_answered:
            self._has_answered = True
            self._note_first(reply, question)
        cost = self.config.cost(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return replace(reply, failures=dict(failures), cost=cost, cut_by_window=cut_by_window)

    def _note_first(self, reply: ChatReply, question: _Question) -> None:
        """Notes what the first answer shows about all others."""
        remark = SERVERS[self._owner].chat_remark if self._owner in SERVERS else ""
        if reply.ids is None:
            self._dialect.without_ids()
        elif remark and question.sampling.temperature not in (0.0, 1.0):
            logger.warning(remark)
        if not (reply.usage.prompt_tokens or reply.usage.completion_tokens):
            logger.warning("%s does not say how many tokens it used: tokens and cost are not counted", self.url)

    async def _back_off(
        self, failure: HttpRefusal | HttpUnreachable, seed: str, num_retries: int, failures: Mapping[str, int]
    ) -> None:
        """Waits before the next request; raises EndpointFailure if there is none."""
        attempts = sum(failures.values())
        if num_retries >= self.config.max_retries:
            raise EndpointFailure(f"{self._clean(failure)} (after {attempts} requests)", failures)
        after_s = failure.retry_after_s if isinstance(failure, HttpRefusal) else None
        if after_s is not None and after_s > MAX_RETRY_AFTER_S:
            raise EndpointFailure(f"{self._clean(failure)} (it asks to wait for {after_s:g} s)", failures)
        if after_s:
            self._limit.hold(after_s)
        await self._sleep(back_off_s(f"{seed}/{attempts}", num_retries, after_s))

    async def _final_error(self, refusal: HttpRefusal, failures: Mapping[str, int]) -> AgentGymError:
        """Returns the error for a refusal that no retry can fix."""
        words = self._clean(refusal)
        if refusal.status == 404 and "model" in words.lower():
            try:
                names = [str(model["id"]) for model in await self._models()]
            except (HttpRefusal, HttpUnreachable):
                names = []
            return unknown_model(self.url, str(self.model), names)
        return mistake(refusal, words, self.config.api_key_env, failures)

    async def _list_models(self) -> list[dict[str, Any]]:
        """Returns the models that the endpoint lists, empty if it has no list; a busy endpoint is asked again."""
        num_retries = 0
        while True:
            try:
                return await self._models()
            except HttpUnreachable as error:
                raise EndpointFailure(f"no endpoint answers at {self.url}: {self._clean(error)}") from None
            except HttpRefusal as refusal:
                if refusal.status in (404, 405, 501):
                    return []
                num_retries += 1
                if not is_transient(refusal):
                    raise mistake(refusal, self._clean(refusal), self.config.api_key_env) from None
                await self._back_off(refusal, "models", num_retries - 1, {cause_of(refusal): num_retries})

    async def _models(self) -> list[dict[str, Any]]:
        answer = await self._http.get(MODELS)
        listed = answer.get("data") if isinstance(answer, dict) else None
        return [model for model in listed or () if isinstance(model, dict) and "id" in model]

    def _clean(self, error: Exception | str) -> str:
        """Returns a message with the key removed."""
        return self._http.secrets.mask_secrets(str(error))
