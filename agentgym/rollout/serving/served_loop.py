"""Episodes whose conversation an outside agent drives, while every reply is sampled and recorded here."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentgym.errors import ConfigError, RenderError
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import replay_info
from agentgym.rollout.episode.long_text import run_if_short, text_size
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.serving.agent_session import (
    AgentGone,
    AgentSession,
    EpisodeEnded,
    Opening,
    RequestRefused,
    StepAnswer,
    StepRequest,
)
from agentgym.rollout.serving.chat_completion import ChatCompletion, ChatRequest
from agentgym.rollout.serving.visible_messages import hide_stop, visible_messages
from agentgym.trajectory import Status, StopReason, Trajectory
from agentgym.types import Message, ToolResult, ToolSpec

__all__ = ["CONTEXT_EXCEEDED", "ServedLoop"]

logger = logging.getLogger(__name__)

CONTEXT_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for messages that leave no room for a reply."""
MAX_KEPT = 4096
"""The number of finished episodes whose last answers can still be requested."""


@dataclass(slots=True)
class _Talk:
    """A conversation in progress: the messages and tools that the builder's row was rendered from."""

    session: AgentSession
    env: HostedEnv
    builder: EpisodeBuilder
    messages: list[Message]
    tools: tuple[ToolSpec, ...]
    shown: list[Message]
    """The messages as the agent has seen or sent them."""
    names: frozenset[str]
    """The tools that the agent can call."""
    reply: Message | None = None
    """The last message, if it is a reply without an answer yet."""
    is_full: bool = False
    """True if the agent's last request did not fit into the window."""


class ServedLoop(RolloutLoop):
    """A RolloutLoop whose conversations are driven from outside, by agents that use chat completions.

    An episode waits until an agent claims it. The agent then asks for replies and has them played (`chat` and `step` of
    its `AgentSession`). What it sends is compared with the conversation so far, message by message; text around an
    assistant's message and reasoning that was left out make no difference. If the conversation continues, its ids do
    too: the sampled ones, followed by the new messages. If the agent changed it (dropped, changed or added something,
    or has other tools), a new row begins with the render of what it sent. Either way a sampled id is trained once, in
    the row it was sampled in. So an agent that only passes on what it gets leaves exactly the record of a RolloutLoop.

    An agent may ask several times before it steps: such a reply is a turn with reward 0. A request that repeats the
    last one is a retry, and gets the recorded reply. An agent that sends nothing for `idle_s` seconds is gone, and its
    episode ends with the status `timeout`.
    """

    def __init__(self, loop: RolloutLoop, *, idle_s: float = 120.0) -> None:
        """Plays with the engine, renderer and limits of `loop`."""
        if not idle_s > 0:
            raise ConfigError(f"idle_s must be greater than 0, got {idle_s}")
        if loop.compaction.at is not None:
            raise ConfigError(
                "an agent outside keeps its own conversation, and shortens it itself: leave compaction.at out, or play "
                "the episodes here (without --serve)"
            )
        super().__init__(loop.engine, loop.renderer, loop.limits, loop.sampling, history=loop.history)
        self.idle_s = idle_s
        self.is_over = False
        self._sessions: dict[str, AgentSession] = {}
        self._live: dict[str, AgentSession] = {}
        """The sessions of episodes that are played, by the key of the episode's engine session."""
        self._waiting: deque[AgentSession] = deque()
        self._claims: deque[asyncio.Future[AgentSession | None]] = deque()
        self._past_sessions: deque[AgentSession] = deque()
        self._warned_fields: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """The number of episodes that wait for an agent."""
        return len(self._waiting)

    @property
    def num_playing(self) -> int:
        """The number of episodes that an agent plays."""
        return sum(not session.is_over for session in self._sessions.values()) - len(self._waiting)

    async def play(self, env: HostedEnv, episode: Episode) -> Trajectory:
        """Plays one episode, as `RolloutLoop.play` does, as soon as an agent has claimed it."""
        session = AgentSession(_name(episode))
        self._sessions[session.name] = self._live[episode.session] = session
        self._offer(session)
        trajectory = None
        try:
            await session.claimed.wait()
            trajectory = await super().play(env, episode)
            return trajectory
        finally:
            if session in self._waiting:
                self._waiting.remove(session)
            session.close(trajectory)
            if self._live.get(episode.session) is session:
                del self._live[episode.session]
            self._forget_oldest(session)

    # The agents' side

    async def claim(self, wait_s: float) -> Opening | None:
        """Returns the next episode for one more agent; None if there is none within `wait_s`.

        Raises EpisodeEnded if the run is over and there will be none.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    session = await self._next_session()
                    session.claimed.set()
                    try:
                        return await session.opening()
                    except EpisodeEnded:
                        continue  # its environment could not be reset
                    except asyncio.CancelledError:
                        self._offer(session)
                        raise
        except TimeoutError:
            return None

    def session(self, name: str) -> AgentSession | None:
        """Returns the session of the episode's agent; None if there is no such episode, or its end was long ago."""
        return self._sessions.get(name)

    def end(self) -> None:
        """Informs agents that wait for an episode that there will be none."""
        self.is_over = True
        while self._claims:
            claim = self._claims.popleft()
            if not claim.done():
                claim.set_result(None)

    async def _next_session(self) -> AgentSession:
        while self._waiting:
            session = self._waiting.popleft()
            if not session.is_over:
                return session
        if self.is_over:
            raise EpisodeEnded("the run is over: there are no more episodes", "run_over")
        claim: asyncio.Future[AgentSession | None] = asyncio.get_running_loop().create_future()
        self._claims.append(claim)
        try:
            next_session = await claim
        except asyncio.CancelledError:
            if claim.done() and not claim.cancelled() and (returned := claim.result()) is not None:
                self._offer(returned)
            raise
        if next_session is None:
            raise EpisodeEnded("the run is over: there are no more episodes", "run_over")
        return next_session

    def _offer(self, session: AgentSession) -> None:
        while self._claims and not session.is_over:
            claim = self._claims.popleft()
            if not claim.done():
                claim.set_result(session)
                return
        if not session.is_over:
            self._waiting.append(session)

    def _forget_oldest(self, session: AgentSession) -> None:
        self._past_sessions.append(session)
        if len(self._past_sessions) > MAX_KEPT:
            oldest = self._past_sessions.popleft()
            if self._sessions.get(oldest.name) is oldest:
                del self._sessions[oldest.name]

    # The conversation

    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        """Plays the conversation, until the environment, a budget or the agent's silence ends it."""
        session = self._live[builder.episode.session]
        messages, tools = await self._open(env, builder)
        names = frozenset(tool.name for tool in tools)
        talk = _Talk(session, env, builder, messages, tools, visible_messages(messages, names), names)
        session.open(talk.shown, tools)
        while True:
            try:
                request = await session.next_request(self.idle_s)
                if isinstance(request, ChatRequest):
                    ending = await self._chat(talk, request)
                else:
                    ending = await self._step(talk, request)
                talk.is_full = False
            except RequestRefused as refusal:
                talk.is_full = refusal.code == CONTEXT_EXCEEDED
                session.answer(refusal)
                continue
            except AgentGone as gone:
                if talk.is_full and (builder.turns or talk.reply):  # the agent gave up at a full window, as a loop does
                    if talk.reply is not None:
                        builder.end_turn(None)
                    return EpisodeEnd(Status.TRUNCATED, StopReason.CONTEXT)
                return EpisodeEnd(Status.TIMEOUT, StopReason.DEADLINE, str(gone), replay_info(builder.episode))
            if ending is not None:
                return ending

    async def _chat(self, talk: _Talk, request: ChatRequest) -> EpisodeEnd | None:
        """Samples, records and answers one reply."""
        self._warn_of_fields(request)
        builder = talk.builder
        ending = await self._follow(talk, request)
        if ending is not None:
            return ending
        started, num_prompt = time.perf_counter(), len(builder.ids)
        max_tokens, cut = self._budget(num_prompt, builder.num_tokens)
        is_own_bound = request.max_tokens is not None and request.max_tokens < max_tokens
        if request.max_tokens is not None and is_own_bound:
            max_tokens = request.max_tokens
        completion = await self._sample(builder, max_tokens, stop=request.stop)
        message = await self._parse(completion, builder, talk.tools)
        builder.add_reply(completion, message, time.perf_counter() - started)
        talk.messages.append(message)
        talk.names = frozenset(tool.name for tool in talk.tools) if request.calls_tools else frozenset()
        talk.shown += visible_messages([hide_stop(message, completion.stop, request.stop)], talk.names)
        talk.reply = message
        turn, finish, created = len(builder.turns), completion.finish_reason, int(time.time())
        name = f"chatcmpl-{builder.episode.session.replace('/', '.')}-{turn}"
        talk.session.answer(
            ChatCompletion(name, turn, talk.shown[-1], finish, num_prompt, len(completion.ids), created)
        )
        if finish == "length" and not is_own_bound and not self._may_answer(cut):
            builder.end_turn(None)
            return EpisodeEnd(Status.TRUNCATED, cut)
        return None

    async def _step(self, talk: _Talk, request: StepRequest) -> EpisodeEnd | None:
        """Gives the last reply to the environment, and its answer to the agent."""
        if talk.reply is None:
            raise RequestRefused("there is no reply to step with: ask for a chat completion first", "no_reply")
        if request.message is not None and not is_same(request.message, talk.shown[-1]):
            raise RequestRefused(
                "the message is not the last reply: an episode is played with the replies that were sampled here; "
                "leave `message` out, or send the last completion's message as it came",
                "not_the_reply",
            )
        builder, turn = talk.builder, len(talk.builder.turns)
        answer = await self._act(talk.env, builder, talk.reply)
        visible = visible_messages([talk.reply, *answer.messages], talk.names)[1:]
        talk.reply = None
        ending = self._ending(answer, builder)
        if ending is None:
            talk.messages = self._conversation_after(talk.env, talk.messages, answer)
            is_retold = answer.history is not None
            talk.shown = visible_messages(talk.messages, talk.names) if is_retold else [*talk.shown, *visible]
            ending = await self._lengthen(talk, answer)
        is_completed = ending is not None and ending.status is Status.COMPLETED
        is_cut = ending is not None and not is_completed
        history = None if answer.history is None else tuple(talk.shown)
        talk.session.answer(StepAnswer(tuple(visible), answer.reward, is_completed, is_cut, turn, history))
        return ending

    async def _lengthen(self, talk: _Talk, answer: EnvStep) -> EpisodeEnd | None:
        exceeded = await self._extend(talk.builder, answer, talk.messages, talk.tools)
        return None if exceeded is None else EpisodeEnd(Status.TRUNCATED, exceeded)

    async def _follow(self, talk: _Talk, request: ChatRequest) -> EpisodeEnd | None:
        """Extends the row to the conversation that the agent sent; returns an ending if a budget ends the episode."""
        new = new_messages(request.messages, talk.shown) if is_same_menu(request.tools, talk.tools) else None
        if talk.reply is None:
            return None if new == () else self._rewrite(talk, request, await self._render(request))
        answer = await self._agents_answer(talk, new or ())
        prompt_ids = await self._render(request) if answer is None else []
        self._check_room(len(prompt_ids))
        talk.builder.end_turn(answer or EnvStep("", ()))
        talk.reply = None
        ending = self._ending(answer or EnvStep("", ()), talk.builder)
        if ending is not None:
            return ending
        if answer is None:
            return self._rewrite(talk, request, prompt_ids)
        talk.messages += answer.messages
        talk.shown += answer.messages
        return await self._lengthen(talk, answer)

    async def _agents_answer(self, talk: _Talk, new: Sequence[Message]) -> EnvStep | None:
        """Returns the agent's own answer to a reply, if it can be recorded: a result for each call, and one text."""
        assert talk.reply is not None
        results = [message for message in new if message.role == "tool"]
        texts = [message for message in new if message.role == "user"]
        calls = talk.reply.tool_calls
        is_told = [*results, *texts] == list(new) and len(texts) <= 1 and (texts or results)
        if not is_told or (results and [result.tool_call_id for result in results] != [call.id for call in calls]):
            return None
        try:
            ids = await run_if_short(text_size(new), self.renderer.extend, talk.builder.ids, new)
        except RenderError:
            return None
        self._check_room(len(talk.builder.ids) + len(ids))
        names = [getattr(call, "name", "") for call in calls]
        pairs = zip(results, names, strict=False)
        answers = tuple(ToolResult(result.tool_call_id or "", name, result.content) for result, name in pairs)
        return EnvStep("\n".join(message.content for message in texts or results), tuple(new), tool_results=answers)

    async def _render(self, request: ChatRequest) -> list[int]:
        """Returns the ids of what the agent sent; raises RequestRefused if the chat format cannot render it."""
        if request.messages[-1].role == "assistant":
            raise RequestRefused("the last message is the assistant's: no agent starts a reply", "no_prefill")
        try:
            return await self._render_prompt(request.messages, request.tools)
        except RenderError as error:
            raise RequestRefused(f"these messages cannot be rendered: {error}", "not_renderable") from error

    def _rewrite(self, talk: _Talk, request: ChatRequest, prompt_ids: list[int]) -> EpisodeEnd | None:
        """Begins a row with what the agent sent."""
        builder = talk.builder
        self._check_room(len(prompt_ids))
        left, reason = self._budget(len(prompt_ids), builder.num_tokens + len(prompt_ids))
        if left < 1 and builder.turns:
            return EpisodeEnd(Status.TRUNCATED, reason)
        if left < 1:
            problem = f"the messages have {len(prompt_ids)} tokens, which leaves none for a reply ({reason})"
            raise RequestRefused(problem, CONTEXT_EXCEEDED, "messages")
        builder.begin_row(prompt_ids, request.messages, request.tools)
        talk.messages, talk.tools, talk.shown = list(request.messages), request.tools, list(request.messages)
        return None

    def _check_room(self, num_tokens: int) -> None:
        """Raises RequestRefused, in OpenAI's words, if a row so long leaves no token of the window for a reply."""
        if num_tokens >= self.window:
            raise RequestRefused(
                f"This model's maximum context length is {self.window} tokens. However, your messages resulted in "
                f"{num_tokens} tokens, which leaves none for the reply. Please reduce the length of the messages.",
                CONTEXT_EXCEEDED,
                "messages",
            )

    def _warn_of_fields(self, request: ChatRequest) -> None:
        """Warns once of each field that an agent sends and that has no effect."""
        for name in set(request.ignored) - self._warned_fields:
            self._warned_fields.add(name)
            logger.warning("an agent sends the field %r, which is unknown here and ignored", name)
        for name in set(request.decided) - self._warned_fields:
            self._warned_fields.add(name)
            logger.warning(
                "an agent sets %s, which plays no role: replies are sampled as the run says (temperature %g), or they "
                "could not be trained on",
                name,
                self.sampling.temperature,
            )


def new_messages(messages: Sequence[Message], record: Sequence[Message]) -> tuple[Message, ...] | None:
    """Returns the messages of `messages` after `record`, or None if it does not begin with them."""
    begins = len(messages) >= len(record) and all(map(is_same, messages, record))
    return tuple(messages[len(record) :]) if begins else None


def is_same(message: Message, original: Message) -> bool:
    """Returns whether a message that came back is the one that was given out."""
    if message.role == original.role == "assistant":
        reasoning = message.reasoning if message.reasoning is not None else original.reasoning
        message = replace(message, content=message.content.strip(), reasoning=reasoning)
        original = replace(original, content=original.content.strip())
    return message == original


def is_same_menu(tools: Sequence[ToolSpec], originals: Sequence[ToolSpec]) -> bool:
    """Returns whether the tools that came back are those that were given out, in their order."""
    tools_json, originals_json = (
        [json.dumps(tool.to_openai(), sort_keys=True, default=dict) for tool in menu] for menu in (tools, originals)
    )
    return tools_json == originals_json


def _name(episode: Episode) -> str:
    """Returns the episode's name in addresses.

    It ends in a secret: anyone who knows the name can play the episode.
    """
    return f"{episode.session.replace('/', '.')}-{secrets.token_urlsafe(16)}"
