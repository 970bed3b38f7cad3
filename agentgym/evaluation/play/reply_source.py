"""The model or the chat endpoint that replies to prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentgym.chat_templates import open_renderer
from agentgym.chat_templates.template_folder import chat_folder
from agentgym.engines.openai.config import ChatEndpointConfig, is_url
from agentgym.engines.openai.endpoint import ChatEndpoint, ContextExceeded, EndpointFailure
from agentgym.errors import ConfigError
from agentgym.evaluation.play.generation import GenerationConfig, Reply, ReplyGenerator, ReplySource, no_reply
from agentgym.evaluation.play.open_model import ModelOptions, open_model
from agentgym.model.model_name import with_digest
from agentgym.rollout.episode.chat_loop import read_marks
from agentgym.rollout.limits import Limits
from agentgym.types import Message

__all__ = ["EndpointReplies", "open_source"]


@dataclass(frozen=True)
class EndpointReplies(ReplySource):
    """Asks an open endpoint for replies; they have ids and logprobs if it gives them."""

    endpoint: ChatEndpoint
    config: GenerationConfig

    async def answer(self, messages: list[Message], *, session: str, seed: int) -> Reply:
        """Returns the reply to messages; one with an error if they are too long, or withheld by a content filter.

        Raises EndpointFailure for a request that failed after all retries, which another prompt's would do too.
        """
        config, window = self.config, self.endpoint.context_window
        max_tokens = config.max_tokens or Limits().turn_tokens_in(window, num_turns=1)
        sampling = config.sampling.for_reply(max_tokens, seed=seed)
        try:
            reply = await self.endpoint.complete(messages, sampling=sampling, session=session)
        except EndpointFailure as failure:
            if isinstance(failure, ContextExceeded) or "content_filter" in failure.failures:
                return no_reply(str(failure))
            raise
        return Reply(
            message=read_marks(reply) if self.endpoint.config.text_marks else reply.message,
            prompt_ids=reply.prompt_ids or (),
            ids=reply.ids or (),
            logprobs=reply.logprobs or (),
            finish_reason=reply.finish_reason,
            stop=reply.stop if reply.stop in sampling.stop else "",
            num_tokens=(reply.usage.prompt_tokens, reply.usage.completion_tokens),
            cost=reply.cost,
        )


@asynccontextmanager
async def open_source(
    model: str, config: GenerationConfig, how: ModelOptions, endpoint: ChatEndpointConfig
) -> AsyncIterator[tuple[ReplySource, str]]:
    """Opens a model, or the chat endpoint of an address; yields it and the name that its replies are recorded by.

    Raises ConfigError for settings that cannot work, EngineError for a server that does not start or answer.
    """
    if is_url(model):
        if how.engine != "local" or how.family or how.chat_template or how.chat_template_kwargs:
            raise ConfigError(
                "a chat endpoint has its own engine and chat format: leave engine, family, chat_template and"
                " chat_template_kwargs out"
            )
        async with ChatEndpoint(model, endpoint) as client:
            await client.open()
            yield EndpointReplies(client, config), f"{client.url} {client.model}"
        return
    folder = chat_folder(model, how.chat_template)
    renderer = open_renderer(folder, how.family, variables=how.chat_template_kwargs)
    engine = await open_model(folder, how.model_settings(config.concurrency))
    try:
        yield ReplyGenerator(engine, renderer, config), with_digest(model)
    finally:
        await engine.close()
