"""Plays the conversation of an episode with an outside agent, whose requests may come side by side."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from dataclasses import dataclass

from agentgym.errors import AgentGymError, EngineError
from agentgym.http_guard import RequestRejected
from agentgym.openai_wire import message_to_openai
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.token_loop import SamplingPlace, parse_completion
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.serving.agent_session import (
    AgentExchange,
    AgentGone,
    AgentSession,
    Answer,
    FinishRequest,
    Replies,
    StepRequest,
    ToolRequest,
)
from agentgym.rollout.serving.branch_label import answers_unknown_calls
from agentgym.rollout.serving.env_steps import EnvSteps, Talk
from agentgym.rollout.serving.reply_tree import Context, Node, SampledReply
from agentgym.rollout.serving.tree_rows import rows_of
from agentgym.rollout.serving.visible_messages import AgentView, hide_stop, visible_messages
from agentgym.rollout.serving.wires.wire import (
    CONTEXT_EXCEEDED,
    AgentReply,
    AgentRequest,
    RequestRefused,
    UnsupportedValue,
)
from agentgym.trajectory import Status, StopReason, Turn
from agentgym.types import JSON, Message

__all__ = ["ConversationLoop"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Order:
    """What is sampled for a request."""

    request: AgentRequest
    context: Context
    node: Node
    prompt_ids: list[int]
    max_tokens: int
    grammar: str
    asked_at: int
    """The number of replies that were asked for before."""


class ConversationLoop(EnvSteps):
    """A RolloutLoop whose conversations an outside agent leads; a subclass brings the agents together with episodes.

    What an agent sends is compared with the episode's conversations, message by message (`ReplyTree`). If it continues
    one, its ids do too: the sampled ones, followed by the new messages. If others have continued that already, it is a
    fork, whose prompt has the same ids. If it continues none, or has other tools, a row begins with the render of what
    it sent. Either way a sampled id is trained once, in the row it was sampled in, or excluded with a reason.
    """

    idle_s: float
    credit: tuple[str, ...]

    @abstractmethod
    def _session_of(self, episode: Episode) -> AgentSession:
        """Returns the session of the episode's agent."""

    @abstractmethod
    def _warn_of_fields(self, request: AgentRequest) -> None:
        """Warns once of each field that an agent sends and that has no effect."""

    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        """Plays the conversation, until the environment, a budget or the agent ends it."""
        session = self._session_of(builder.episode)
        messages, tools = await self._reset(env, builder)
        talk = Talk(session, env, builder, frozenset(tool.name for tool in tools))
        views = visible_messages(messages, AgentView(talk.names))
        talk.tree.add_opening(messages, views, tools, await self._first_prompt(messages, tools))
        session.open(views, tools)
        ending = None
        try:
            ending = await self._serve(talk)
            return ending
        finally:
            has_reward = ending is not None and ending.status.trainable
            builder.add_rows(*rows_of(talk.tree, has_reward=has_reward, credit=self.credit))
            if not talk.tree.replies and talk.tree.calls:
                opening: list[JSON] = [message_to_openai(message) for message in messages]
                builder.note({}, {"ids_left_out": {"opening": opening}})
            await self._end_branches(talk)

    async def _end_branches(self, talk: Talk) -> None:
        """Releases the engine's sessions of all branches; that of the episode itself is released after it."""
        others = [session for session in talk.sessions if session != talk.episode.session]
        await asyncio.gather(*map(self._end_session, others))

    async def _serve(self, talk: Talk) -> EpisodeEnd:
        """Answers requests as they come, until one of them ends the episode."""
        tasks: list[asyncio.Task[EpisodeEnd | None]] = []
        arrival: asyncio.Task[AgentExchange] | None = None
        try:
            while True:
                arrival = arrival or asyncio.ensure_future(talk.session.next_exchange())
                patience = None if tasks else self.idle_s
                await asyncio.wait([arrival, *tasks], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                finished = [task for task in tasks if task.done()]
                if not finished and not arrival.done():
                    return self._end_of_silence(talk)
                tasks = [task for task in tasks if task not in finished]
                endings = [task.result() for task in finished]
                if ending := next(filter(None, endings), None):
                    return ending
                if arrival.done():
                    tasks.append(asyncio.ensure_future(self._handle(talk, arrival.result())))
                    arrival = None
        finally:
            left = [*tasks, *([arrival] if arrival is not None else [])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _handle(self, talk: Talk, exchange: AgentExchange) -> EpisodeEnd | None:
        """Answers a request; returns how the episode ends if it ends with it."""
        request = exchange.request
        answer: Answer | None
        try:
            if isinstance(request, AgentRequest):
                answer, ending = await self._chat(talk, exchange, request)
            elif isinstance(request, StepRequest):
                answer, ending = await self._step(talk, request)
            elif isinstance(request, ToolRequest):
                answer, ending = await self._call_tool(talk, request)
            else:
                answer, ending = await self._finish(talk, request or FinishRequest())
            if not isinstance(request, AgentRequest):
                talk.limit = None
            exchange.request = None if answer is not None else request
        except (RequestRefused, RequestRejected) as refusal:
            talk.limit = StopReason.CONTEXT if refusal.code == CONTEXT_EXCEEDED else None
            talk.session.forget(exchange)
            exchange.future.set_result(refusal)
            return None
        if answer is not None:
            exchange.future.set_result(answer)
        return ending

    def _end_of_silence(self, talk: Talk) -> EpisodeEnd:
        """Returns how an episode ends whose agent is silent; one that gave up at a limit ends as a loop does."""
        if talk.limit and talk.tree.replies:
            return self._ended_by_agent(talk, talk.limit)
        gone = AgentGone(f"the agent asked for nothing within {self.idle_s:g} s (idle_s)")
        return self._failed_agent(talk, Status.TIMEOUT, str(gone))

    # Replies

    async def _chat(
        self, talk: Talk, exchange: AgentExchange, request: AgentRequest
    ) -> tuple[Answer | None, EpisodeEnd | None]:
        """Samples, records and returns the replies to a request."""
        self._warn_of_fields(request)
        try:
            grammar = self._constraint(request)
            async with talk.prompt_lock:
                context, node, prompt_ids = await self._context(talk.tree, request)
        except AgentGymError:
            raise
        except Exception as error:  # a fault of ours at what one agent sends, before anything is sampled
            logger.exception("a request of the episode %s could not be read", talk.session.label)
            raise RequestRejected(500, "server_error", "the request could not be read") from error
        if request.counts_only:
            message = Message("assistant", "")
            return Replies((AgentReply("", 0, message, "stop", len(prompt_ids), 0, 0),)), None
        max_tokens, cut = self._budget(len(prompt_ids), talk.tree.num_tokens)
        if max_tokens < 1 and talk.tree.replies:
            return None, await self._end_at_budget(talk, cut)
        if max_tokens < 1:
            problem = f"the messages have {len(prompt_ids)} tokens, which leaves none for a reply ({cut})"
            raise RequestRefused(problem, CONTEXT_EXCEEDED, "messages")
        if talk.tree.num_asked >= self.limits.max_turns:
            return None, await self._end_at_budget(talk, StopReason.MAX_TURNS)
        is_own_bound = request.max_tokens is not None and request.max_tokens < max_tokens
        if request.max_tokens is not None and is_own_bound:
            max_tokens = request.max_tokens
        order = _Order(request, context, node, prompt_ids, max_tokens, grammar, talk.tree.num_asked)
        places = [self._place(talk, context, request) for _ in range(request.num_samples)]
        try:
            replies = await asyncio.gather(*(self._sample_reply(talk, order, place) for place in places))
        except EngineError as error:
            if grammar and getattr(error, "status", 0) in (400, 422):  # it cannot compile what the agent requires
                value = request.schema if request.schema is not None else request.tool_choice
                raise UnsupportedValue(request.constraint, value, reason=str(error)[:300]) from error
            raise
        for reply in replies:
            reply.exchange = exchange
        answer = Replies(tuple(self._agent_reply(talk, request, reply, len(prompt_ids)) for reply in replies))
        is_cut = any(reply.completion.finish_reason == "length" for reply in replies) and not is_own_bound
        talk.limit = cut if is_cut else None
        # In a conversation of its own an agent goes on after a cut reply, or ends.
        is_end = cut is StopReason.TRAJECTORY_TOKENS or all(each.is_env for each in context.branch)
        if is_cut and is_end and not self._may_answer(cut):
            return answer, EpisodeEnd(Status.TRUNCATED, cut)
        return answer, None

    def _place(self, talk: Talk, context: Context, request: AgentRequest) -> SamplingPlace:
        """Returns the place of the context's next sample, in the session of the reply before it if that is free."""
        parent, own = context.parent, talk.episode.session
        before = own if parent is None else parent.session
        is_free = before not in talk.sessions or (parent is not None and talk.sessions[before] is parent)
        session = before if is_free else f"{own}/{len(talk.sessions)}"
        talk.sessions[session] = None
        return SamplingPlace(talk.episode, session, context.depth, talk.tree.ask(context, request))

    async def _sample_reply(self, talk: Talk, order: _Order, place: SamplingPlace) -> SampledReply:
        """Samples a reply and adds it to the tree."""
        started, request, context, prompt_ids = time.perf_counter(), order.request, order.context, order.prompt_ids
        completion = await self._sample(prompt_ids, order.max_tokens, place, order.grammar, request.stop)
        message = await parse_completion(self.renderer, completion, context.tools, prompt_ids)
        tools = frozenset(tool.name for tool in context.tools) if request.tool_choice != "none" else frozenset()
        trimmed = hide_stop(message, completion.stop, request.stop)
        view = AgentView(tools, answers_unknown_calls(request.client))
        (visible,) = visible_messages([trimmed], view)
        timings = {"generate_s": time.perf_counter() - started}
        reply = SampledReply(
            context=context,
            number=len(talk.tree.replies),
            branch=place.branch,
            session=place.session,
            completion=completion,
            message=message,
            shown=visible,
            turn=Turn(message, None, finish_reason=completion.finish_reason, stop=completion.stop, timings=timings),
            view=view,
            agent=request.agent,
            asked_at=order.asked_at,
            excluded="constrained" if order.grammar else "",
        )
        talk.tree.add_reply(reply, order.node)
        talk.sessions[place.session] = reply
        return reply

    def _agent_reply(self, talk: Talk, request: AgentRequest, reply: SampledReply, num_prompt: int) -> AgentReply:
        completion = reply.completion
        texts = [self.renderer.decode([token]) for token in completion.ids] if request.logprobs else []
        return AgentReply(
            f"{talk.episode.session.replace('/', '.')}-{reply.number}",
            reply.number,
            reply.shown,
            completion.finish_reason,
            num_prompt,
            len(completion.ids),
            int(time.time()),
            completion.stop if completion.stop in request.stop else "",
            tuple(zip(texts, completion.logprobs, strict=bool(texts))) if texts else (),
        )
