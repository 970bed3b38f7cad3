"""Plays one episode through a chat endpoint; the environment, its limits and its record are those of any engine."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentgym.chat_templates.formats.hermes import HERMES
from agentgym.engines.openai.endpoint import ChatEndpoint, ChatReply, ContextExceeded, EndpointFailure
from agentgym.engines.protocol import Completion
from agentgym.errors import EnvironmentFault
from agentgym.rollout.episode.episode import EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import EpisodeLoop, under_system_prompt
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.trajectory import Status, StopReason
from agentgym.types import JSON, Message, ToolSpec

__all__ = ["ChatLoop", "read_marks"]

logger = logging.getLogger(__name__)

_MARK = re.compile("|".join(map(re.escape, HERMES.marks)))


@dataclass
class _Talk:
    """The conversation of an episode, and what it cost."""

    messages: list[Message | ChatReply]
    tools: tuple[ToolSpec, ...]
    replies: list[ChatReply] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """The number of requests without a reply, by cause."""
    has_ids: bool = True

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the last prompt with its reply."""
        usage = self.replies[-1].usage if self.replies else None
        return usage.prompt_tokens + usage.completion_tokens if usage else 0

    def metrics(self) -> dict[str, float]:
        """Returns tokens and cost of the answered requests; requests that failed are only counted."""
        counts: dict[str, float] = {
            "num_requests": self.failures.total() + len(self.replies),
            "num_retries": self.failures.total(),
            "prompt_tokens": sum(reply.usage.prompt_tokens for reply in self.replies),
            "cached_tokens": sum(reply.usage.cached_tokens for reply in self.replies),
            "completion_tokens": sum(reply.usage.completion_tokens for reply in self.replies),
        }
        if num_filtered := self.failures["content_filter"]:
            counts["filtered_replies"] = num_filtered
        costs = [reply.cost for reply in self.replies if reply.cost is not None]
        return {**counts, "cost": sum(costs)} if costs else counts

    def info(self, endpoint: ChatEndpoint, opening: Sequence[JSON]) -> dict[str, JSON]:
        """Returns the seconds of each reply, the failed requests, and the opening messages if no row holds them."""
        facts: dict[str, JSON] = {
            "model": endpoint.model,
            **({"failures": dict(self.failures)} if self.failures else {}),
            **({"left_out": [*endpoint.left_out]} if endpoint.left_out else {}),
            "latency_s": [round(reply.latency_s, 4) for reply in self.replies],
            "first_token_s": [round(r.first_token_s, 4) for r in self.replies if r.first_token_s is not None],
        }
        without_ids: dict[str, JSON] = {"token_ids": False, "opening": opening}
        return {"chat_endpoint": {**facts, **({"token_ids": True} if self.has_ids else without_ids)}}


class ChatLoop(EpisodeLoop):
    """Plays episodes with the replies of a `ChatEndpoint`.

    Token budgets use the endpoint's own counts. If it returns ids and logprobs, they are recorded as sampled: a prompt
    that begins with everything before it continues the row, any other begins a new one. Otherwise the trajectory has no
    rows. A failure of the endpoint is an `engine_error`. A refused key, model or address raises, because every other
    episode would fail too.
    """

    def __init__(
        self, endpoint: ChatEndpoint, limits: Limits | None = None, sampling: SamplingConfig | None = None
    ) -> None:
        super().__init__(limits or Limits())
        self.endpoint = endpoint
        self.sampling = sampling or SamplingConfig()
        self._has_warned = False

    async def _end_session(self, session: str) -> None:
        """Does nothing: an endpoint holds no session."""

    async def close(self) -> None:
        """Closes the endpoint's connections."""
        await self.endpoint.close()

    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        """Plays the conversation itself, to its regular end."""
        messages, tools = await self._reset(env, builder)
        opening: list[JSON] = [{"role": message.role, "content": message.content} for message in messages]
        talk = _Talk(list(messages), tools)
        try:
            return await self._play_turns(env, builder, talk)
        finally:
            builder.note(talk.metrics(), talk.info(self.endpoint, opening))

    async def _play_turns(self, env: HostedEnv, builder: EpisodeBuilder, talk: _Talk) -> EpisodeEnd:
        while True:
            max_tokens, cut = self._budget(talk)
            if max_tokens < 1:
                return EpisodeEnd(Status.TRUNCATED, cut)
            try:
                reply = await self._reply(builder, talk, max_tokens)
            except ContextExceeded as error:
                if not talk.replies:
                    raise EnvironmentFault(
                        f"the first prompt does not fit into the model's context window: {error}"
                    ) from None
                return EpisodeEnd(Status.TRUNCATED, StopReason.CONTEXT)
            message = self._record(builder, talk, reply)
            if reply.finish_reason == "length":
                by_window = reply.cut_by_window or 0 < reply.usage.completion_tokens < max_tokens
                cut = StopReason.CONTEXT if by_window else cut
                if not self._may_answer(cut):
                    builder.end_turn(None)
                    return EpisodeEnd(Status.TRUNCATED, cut)
            answer = await self._act(env, builder, message)
            ending = self._ending(answer, len(builder.turns))
            if ending is not None:
                return ending
            if answer.history is None:
                talk.messages += (reply, *answer.messages)
            else:
                talk.messages = [*under_system_prompt(env, answer.history)]

    def _budget(self, talk: _Talk) -> tuple[int, StopReason]:
        """Returns how many tokens a reply may have, and the stop reason if it uses all of them."""
        limits, used = self.limits, talk.num_tokens
        windows = [window for window in (limits.context_window, self.endpoint.context_window) if window is not None]
        left, reason = limits.turn_tokens_in(min(windows, default=None)), StopReason.TURN_TOKENS
        if limits.trajectory_tokens is not None and limits.trajectory_tokens - used < left:
            left, reason = limits.trajectory_tokens - used, StopReason.TRAJECTORY_TOKENS
        if windows and min(windows) - used < left:
            left, reason = min(windows) - used, StopReason.CONTEXT
        return left, reason

    async def _reply(self, builder: EpisodeBuilder, talk: _Talk, max_tokens: int) -> ChatReply:
        """Requests the next reply, and counts what was sent for it."""
        episode = builder.episode
        sampling = self.sampling.for_reply(max_tokens, seed=episode.seed(len(builder.turns)))
        try:
            reply = await self.endpoint.complete(talk.messages, talk.tools, sampling, session=episode.session)
        except EndpointFailure as failure:
            talk.failures.update(failure.failures)
            raise
        talk.failures.update(reply.failures)
        talk.replies.append(reply)
        return reply

    def _record(self, builder: EpisodeBuilder, talk: _Talk, reply: ChatReply) -> Message:
        """Records the reply, with its ids if it has them, and returns its message."""
        message = self._read(reply, talk.tools)
        stop = reply.stop if reply.stop in self.sampling.stop else ""  # a server may have strings of its own
        if reply.ids is None or reply.prompt_ids is None or reply.logprobs is None:
            talk.has_ids = False
            builder.forget_ids()
        if not talk.has_ids:
            builder.begin_turn(message, reply.finish_reason, reply.latency_s, stop)
            return message
        assert reply.ids is not None and reply.prompt_ids is not None and reply.logprobs is not None
        num_before = len(builder.ids)
        if num_before and len(reply.prompt_ids) > num_before and list(reply.prompt_ids[:num_before]) == builder.ids:
            builder.add_answer(reply.prompt_ids[num_before:])
        else:
            builder.begin_row(reply.prompt_ids)
        sampled = reply.ids, reply.logprobs, (0,) * len(reply.ids)
        completion = Completion(*sampled, reply.finish_reason, stop=stop)
        excluded = "constrained" if self.endpoint.config.strict_tools else ""
        builder.add_reply(completion, message, reply.latency_s, excluded=excluded)
        return message

    def _read(self, reply: ChatReply, tools: tuple[ToolSpec, ...]) -> Message:
        """Returns the reply's message; marks that the server left in its text are parsed."""
        if not self.endpoint.config.text_marks:
            return reply.message
        message = read_marks(reply)
        if tools and len(message.tool_calls) > len(reply.message.tool_calls) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s leaves tool calls in the text; they are read there (a server with a parser, such as "
                "--tool-call-parser hermes, gives them as calls)",
                self.endpoint.url,
            )
        return message


def read_marks(reply: ChatReply) -> Message:
    """Returns a reply's message, with the reasoning and the calls whose marks a server left in its text."""
    message = reply.message
    if message.tool_calls or not _MARK.search(message.content):
        return message
    parsed = HERMES.parse(message.content)
    reasoning = "\n".join(filter(None, (message.reasoning, parsed.reasoning))) or None
    return Message("assistant", parsed.content, reasoning, parsed.tool_calls)
