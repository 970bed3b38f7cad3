"""Replies to many prompts, without an environment: texts or messages in, replies out, in the order of the prompts."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, TypeAlias

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Engine, FinishReason
from agentgym.errors import AgentGymError, ConfigError, EngineError
from agentgym.openai_wire import message_from_openai
from agentgym.rollout.episode.long_text import run_if_short, text_size
from agentgym.rollout.episode.token_loop import check_completion, end_at_stop, parse_completion
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.rollout.seeds import derive
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least
from agentgym.types import Message, ToolSpec

__all__ = ["GenerationConfig", "Prompt", "Reply", "ReplyGenerator", "ReplySource", "messages_of_prompt", "no_reply"]

Prompt: TypeAlias = "str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]"
"""A text, which a user says, or messages: ours, or OpenAI's objects with `role` and `content`."""
_CALLS = count()
AHEAD = 4
"""The most prompts that are answered before an earlier one is, as a multiple of the concurrency."""


@config_class
class GenerationConfig:
    """The settings of replies to prompts."""

    max_tokens: int | None = None
    """The most ids of a reply; None is the model's window, at most 8,192."""
    temperature: float = 1.0
    """The temperature; 0 is greedy, and logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """The nucleus mass in (0, 1]; 1 is off."""
    top_k: int = 0
    """The number of most probable ids to sample from; 0 is off."""
    min_p: float = 0.0
    """Leaves out ids that are less probable than this share of the most probable one; 0 is off."""
    repetition_penalty: float = 1.0
    """Makes ids that prompt or reply have already less probable: positive logits are divided by it, negative ones
    multiplied; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each id that the reply has already, as OpenAI does; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the reply has the id; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply, such as </answer>, wherever they occur in it; the reply ends with the text."""
    seed: int = 0
    """Equal seeds give equal replies to equal prompts at equal places, whatever else is sampled meanwhile."""
    num_replies: int = 1
    """The replies to each prompt."""
    concurrency: int = 256
    """The most replies that are sampled at once. It changes no reply."""

    @property
    def sampling(self) -> SamplingConfig:
        """The distribution that replies are drawn from; raises ConfigError for one that does not exist."""
        names = [setting.name for setting in fields(SamplingConfig)]
        return SamplingConfig(**{name: getattr(self, name) for name in names})

    def __post_init__(self) -> None:
        _ = self.sampling  # checks it
        check_at_least(1, self, "max_tokens", "num_replies", "concurrency")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply to a prompt."""

    message: Message
    """The reply as it was read: its text, reasoning and tool calls."""
    prompt_ids: tuple[int, ...] = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    """The sampled ids, the one that ended the reply included."""
    logprobs: tuple[float, ...] = field(repr=False)
    """The natural logprob of each id under the distribution that it was drawn from."""
    finish_reason: FinishReason | None
    """`stop`, or `length` for a reply that `max_tokens` or the window ended; None if there is an error."""
    stop: str = ""
    """The stop string that ended the reply; empty if something else did."""
    error: str = ""
    """The reason why there is no reply, such as a prompt that is longer than the window."""
    num_tokens: tuple[int, int] | None = None
    """The tokens of prompt and reply by the count of an endpoint, which may give no ids; None where there are ids."""
    cost: float | None = None
    """The price of an endpoint's reply, in the currency of its prices; None if no price is set."""

    @property
    def text(self) -> str:
        """The text of the reply, without reasoning and calls."""
        return self.message.content


def messages_of_prompt(prompt: Prompt) -> list[Message]:
    """Returns the messages of a prompt; raises ConfigError for something else, or for none."""
    parts: object = [prompt] if isinstance(prompt, str | Message | Mapping) else prompt
    if not isinstance(parts, Sequence) or not parts:
        raise ConfigError(f"a prompt is a text or a list of messages that is not empty, got {prompt!r}")
    return [_message(part) for part in parts]


def _message(part: object) -> Message:
    if isinstance(part, Message):
        return part
    return Message("user", part) if isinstance(part, str) else message_from_openai(part)


class ReplySource(ABC):
    """Replies to prompts, in the order of the prompts."""

    config: GenerationConfig

    @abstractmethod
    async def answer(self, messages: list[Message], *, session: str, seed: int) -> Reply:
        """Returns the reply to messages, which has an error if there is none."""

    async def replies(self, prompts: Iterable[Prompt], first: int = 0) -> AsyncGenerator[Reply, None]:
        """Yields the replies to the prompts in their order, `num_replies` to each; `first` is the place of the first.

        Prompts are read as they are needed, so that they may be many. What is no prompt, or is too long, gives a reply
        with an error. Raises EngineError if the engine or the endpoint fails.
        """
        config, gate, call = self.config, asyncio.Semaphore(self.config.concurrency), next(_CALLS)

        async def answer(prompt: Prompt, index: int, number: int) -> Reply:
            session, seed = f"generate-{call}-{index}-{number}", derive(config.seed, index, number)
            async with gate:
                try:
                    messages = messages_of_prompt(prompt)
                except AgentGymError as error:
                    return no_reply(str(error))
                return await self.answer(messages, session=session, seed=seed)

        waiting: deque[asyncio.Task[Reply]] = deque()
        try:
            for index, prompt in enumerate(prompts, first):
                for number in range(config.num_replies):
                    waiting.append(asyncio.create_task(answer(prompt, index, number)))
                while len(waiting) >= AHEAD * config.concurrency or (waiting and waiting[0].done()):
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


@dataclass(frozen=True)
class ReplyGenerator(ReplySource):
    """Samples replies from an engine."""

    engine: Engine
    renderer: Renderer
    config: GenerationConfig
    tools: Sequence[ToolSpec] = ()
    """The tools that the model is shown; nothing here runs them."""

    async def answer(self, messages: list[Message], *, session: str, seed: int) -> Reply:
        """Returns the reply to messages; one with an error to those that the chat format cannot express."""
        try:
            size = text_size(messages, self.tools)
            ids = await run_if_short(size, self.renderer.render, messages, self.tools)
        except AgentGymError as error:
            return no_reply(str(error))
        try:
            return await self.reply(ids, session=session, seed=seed)
        finally:
            await self.engine.abort(session)

    async def reply(self, ids: Sequence[int], *, session: str, seed: int) -> Reply:
        """Samples one reply on the ids of a prompt; the reply has an error if they leave no room for one."""
        config, window = self.config, self.engine.context_window
        limit = config.max_tokens or Limits().turn_tokens_in(window, num_turns=1)
        max_tokens = min(limit, window - len(ids))
        if max_tokens < 1:
            return no_reply(f"the prompt has {len(ids)} tokens, and the window {window}", ids)
        sampling = config.sampling.for_reply(max_tokens, seed=seed, renderer=self.renderer)
        completion = await self.engine.generate(ids, sampling, session=session)
        check_completion(completion, sampling, self.engine.vocab_size)
        if completion.finish_reason == "abort":
            raise EngineError("the engine gave up a reply: it was closed, or its weights were replaced")
        completion = await end_at_stop(completion, sampling)
        message = await parse_completion(self.renderer, completion, self.tools, ids)
        return Reply(
            message=message,
            prompt_ids=tuple(ids),
            ids=completion.ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            stop=completion.stop,
        )


def no_reply(error: str, ids: Sequence[int] = ()) -> Reply:
    """Returns what stands for the reply to a prompt that has none."""
    nothing = Message("assistant", "")
    return Reply(message=nothing, prompt_ids=tuple(ids), ids=(), logprobs=(), finish_reason=None, error=error)
