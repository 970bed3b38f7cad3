"""The steps of a served environment: a reply that the agent gives to it, a call of one of its tools, and the end."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from agentgym.envs.base.action import Action
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd, answered_turn
from agentgym.rollout.episode.episode_loop import replay_info
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.serving.agent_session import (
    AgentSession,
    Answer,
    FinishRequest,
    StepAnswer,
    StepRequest,
    ToolAnswer,
    ToolRequest,
)
from agentgym.rollout.serving.branch_label import SIDE_LABELS
from agentgym.rollout.serving.branch_prompts import BranchPrompts
from agentgym.rollout.serving.branch_roots import BranchRoots
from agentgym.rollout.serving.reply_tree import ReplyTree, SampledReply, next_context
from agentgym.rollout.serving.visible_messages import visible_messages
from agentgym.rollout.serving.wires.wire import RequestRefused, UnreadableCall
from agentgym.trajectory import Status, StopReason, Turn
from agentgym.types import JSON, AnyCall, MalformedCall, Message, ToolCall

__all__ = ["EnvSteps", "Talk", "tool_of"]

NOT_IN_NAMES = re.compile("[^A-Za-z0-9_-]")
"""What the names of tools may not have on the wire, and harnesses replace."""
NO_ACTION = "the agent ended, and the environment saw no action of it and gave no verdict"


@dataclass(slots=True, eq=False)
class Talk:
    """The conversation of an episode."""

    session: AgentSession
    env: HostedEnv
    builder: EpisodeBuilder
    names: frozenset[str]
    """The environment's tools."""
    tree: ReplyTree = field(default_factory=ReplyTree)
    env_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    prompt_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sessions: dict[str, SampledReply | None] = field(default_factory=dict)
    """The engine's sessions, each with its last reply; None while a request of it is in flight."""
    num_actions: int = 0
    """The number of steps of the environment while the agent played: replies, and calls of its tools."""
    is_over: bool = False
    """True if a step has ended the episode: no other may follow."""
    limit: StopReason | None = None
    """The limit that the agent's last request met: it did not fit into the window, or its reply was cut."""

    @property
    def episode(self) -> Episode:
        return self.builder.episode


class EnvSteps(BranchPrompts):
    """A RolloutLoop whose environment an outside agent steps. Steps of an episode run one after the other."""

    def _ended_by_agent(self, talk: Talk, reason: StopReason) -> EpisodeEnd:
        """Returns the ending of an episode whose agent cannot or does not go on, and whose environment goes on."""
        if talk.num_actions:
            return EpisodeEnd(Status.TRUNCATED, reason)
        return EpisodeEnd(Status.UNPLAYED, reason, NO_ACTION, replay_info(talk.episode))

    def _failed_agent(self, talk: Talk, status: Status, error: str) -> EpisodeEnd:
        reason = StopReason.DEADLINE if status is Status.TIMEOUT else StopReason.AGENT
        return EpisodeEnd(status, reason, error, replay_info(talk.episode))

    async def _step(self, talk: Talk, request: StepRequest) -> tuple[Answer | None, EpisodeEnd | None]:
        """Gives a reply to the environment, and its answer to the agent; None if the episode has ended meanwhile."""
        async with talk.env_lock:
            if talk.is_over:
                return None, None
            reply = _reply_to_step(talk.tree, request)
            if reply.step is not None:
                return reply.step, None
            answer = await self._act_on(talk, reply)
            talk.num_actions += 1
            visible = visible_messages([reply.message, *answer.messages], reply.view)[1:]
            ending = self._ending(answer, len(talk.tree.replies))
            history: tuple[Message, ...] | None = None
            if ending is None:
                conversation = [*reply.context.messages, reply.message]
                messages = self._conversation_after(talk.env, conversation, answer)
                if answer.history is not None:
                    history = tuple(visible_messages(messages, reply.view))
                ending = await self._lengthen(talk, reply, answer, messages, history or visible)
            talk.is_over = ending is not None
            is_completed = ending is not None and ending.status is Status.COMPLETED
            is_cut = ending is not None and not is_completed
            reply.step = StepAnswer(tuple(visible), answer.reward, is_completed, is_cut, reply.number, history)
            return reply.step, ending

    async def _act_on(self, talk: Talk, reply: SampledReply) -> EnvStep:
        started = time.perf_counter()
        answer = self._with_note(await talk.env.step(Action.from_message(reply.message)), reply.message)
        talk.builder.answer = reply.answer = answer
        reply.follow(talk.tree.num_asked)
        timings = {**reply.turn.timings, "env_s": time.perf_counter() - started}
        reply.turn = replace(reply.turn, timings=timings)
        return answer

    async def _lengthen(
        self, talk: Talk, reply: SampledReply, answer: EnvStep, messages: Sequence[Message], views: Sequence[Message]
    ) -> EpisodeEnd | None:
        """Adds the conversation after the environment's answer; returns an ending if a budget leaves no reply."""
        before, tools = reply.prompt(), reply.context.tools
        prompt = await self._render_next(before, answer, messages, tools)
        row_tokens = len(prompt.ids) + (0 if prompt.begins_row else len(before))
        left, reason = self._budget(row_tokens, talk.tree.num_tokens + len(prompt.ids))
        if left < 1:
            return EpisodeEnd(Status.TRUNCATED, reason)
        context = next_context(reply, messages, prompt, answer, is_env=True)
        talk.tree.add(context)
        talk.tree.show(context, reply, views, is_whole=answer.history is not None)
        return None

    async def _call_tool(self, talk: Talk, request: ToolRequest) -> tuple[Answer | None, EpisodeEnd | None]:
        """Steps the environment with one call, and rewards the reply that made it; None if the episode has ended.

        A call that was not sampled here rewards the last reply.
        """
        async with talk.env_lock:
            if talk.is_over:
                return None, None
            reply, position = _find_call(talk.tree, request, talk.names)
            call = ToolCall(f"call_{talk.num_actions}", request.name, request.arguments)
            if reply is not None:
                call = replace(call, id=reply.message.tool_calls[position].id)
            message, started = Message("assistant", "", tool_calls=(call,)), time.perf_counter()
            answer = talk.builder.answer = await talk.env.step(Action.from_message(message))
            talk.num_actions += 1
            if reply is not None:
                reply.tool_answers[position] = answer
            else:
                turn = answered_turn(Turn(message, None), answer, time.perf_counter() - started)
                talk.tree.add_call(turn)
            ending = self._ending(answer, 0 if talk.tree.replies else talk.num_actions)
            talk.is_over = ending is not None
            text = "\n".join(message.content for message in answer.messages)
            return ToolAnswer(text, any(result.error is not None for result in answer.tool_results)), ending

    async def _finish(self, talk: Talk, request: FinishRequest) -> tuple[Answer | None, EpisodeEnd | None]:
        """Gives the agent's final text to the environment, and ends the episode with its verdict.

        An agent that fails at a full window or a cut reply (Codex) has no final text, and is no failure: the model met
        the limit.
        """
        async with talk.env_lock:
            if talk.is_over:
                return None, None
            talk.is_over = True
            limit = talk.limit if talk.tree.replies and request.failure is Status.AGENT_ERROR else None
            if request.failure is not None and limit is None:
                return StepAnswer((), 0.0, False, True), self._failed_agent(talk, request.failure, request.error)
            may_call = request.is_exit and not talk.names
            reply = None if limit else _final_reply(talk.tree, may_call)
            ending = await self._judge(talk, reply, limit or StopReason.AGENT)
            is_completed = ending.status is Status.COMPLETED
            if reply is None or reply.answer is None:
                return StepAnswer((), 0.0, False, True), ending
            visible = visible_messages([reply.message, *reply.answer.messages], reply.view)[1:]
            reward = reply.answer.reward
            return StepAnswer(tuple(visible), reward, is_completed, not is_completed, reply.number), ending

    async def _end_at_budget(self, talk: Talk, reason: StopReason) -> EpisodeEnd | None:
        """Ends an episode whose agent may ask for nothing more: what it has said last may be its final text."""
        async with talk.env_lock:
            if talk.is_over:
                return None
            talk.is_over = True
            return await self._judge(talk, _final_reply(talk.tree, may_call=False), reason)

    async def _judge(self, talk: Talk, reply: SampledReply | None, reason: StopReason) -> EpisodeEnd:
        """Returns the ending by the environment's verdict on the final text, if there is one and it gives one."""
        ending = None if reply is None else self._ending(await self._act_on(talk, reply), 0)
        return ending or self._ended_by_agent(talk, reason)


def is_same(message: Message, original: Message) -> bool:
    """Returns whether a message that came back is the one that was given out; reasoning may be left out."""
    if message.role == original.role == "assistant":
        reasoning = message.reasoning if message.reasoning is not None else original.reasoning
        message = replace(message, content=message.content.strip(), reasoning=reasoning)
        original = replace(original, content=original.content.strip())
    calls, own = ([_call_key(call) for call in each.tool_calls] for each in (message, original))
    return calls == own and replace(message, tool_calls=()) == replace(original, tool_calls=())


def _call_key(call: AnyCall) -> Hashable:
    """Returns the key of a call: one that cannot be read comes back as JSON text, its fields in any order."""
    if not isinstance(call, MalformedCall):
        return (call.id, call.name, _arguments_key(call.arguments))
    fields: JSON = {"name": call.name, "arguments": call.arguments} if isinstance(call, UnreadableCall) else None
    with suppress(ValueError):
        fields = fields or json.loads(call.raw)
    return (call.id, json.dumps(fields or call.raw, sort_keys=True))


def _reply_to_step(tree: ReplyTree, request: StepRequest) -> SampledReply:
    """Returns the reply that a step gives to the environment, or gave; raises RequestRefused."""
    newest = next((reply for reply in reversed(tree.replies) if not reply.is_lost), None)
    if request.message is None:
        if newest is None or not (newest.is_open or newest.step is not None):
            raise RequestRefused("there is no reply to step with: ask for a chat completion first", "no_reply")
        return newest
    same = [reply for reply in reversed(tree.replies) if is_same(request.message, reply.shown)]
    for reply in same:
        if reply.is_open or (reply is newest and reply.step is not None):
            return reply
    raise RequestRefused(
        "the message is not a reply that waits for an answer: an episode is played with the replies that were sampled "
        "here; leave `message` out, or send the last completion's message as it came",
        "not_the_reply" if newest is not None else "no_reply",
    )


def _find_call(tree: ReplyTree, request: ToolRequest, names: Collection[str]) -> tuple[SampledReply | None, int]:
    """Returns the first sampled call of the tool with equal arguments that was not run, as its reply and its position.

    Calls whose results the agent has not sent yet are looked at before others. If no arguments are equal, a harness has
    changed them (`"5"` to 5): it is the newest call of the tool that waits.
    """
    waiting = sorted(tree.replies, key=lambda reply: (reply.is_lost, bool(reply.contexts)))
    calls = [
        (reply, position, call)
        for reply in waiting
        for position, call in enumerate(reply.message.tool_calls if reply.answer is None else ())
        if isinstance(call, ToolCall) and position not in reply.tool_answers
        if tool_of(call.name, names) == request.name
    ]
    key = _arguments_key(request.arguments)
    equal = [(reply, position) for reply, position, call in calls if _arguments_key(call.arguments) == key]
    other = [(reply, position) for reply, position, _ in reversed(calls) if not (reply.contexts or reply.is_lost)]
    return next(iter(equal or other), (None, 0))


def tool_of(name: str, tools: Collection[str]) -> str:
    """Returns the environment's tool that a harness offers under a name of its own; empty if it is none.

    >>> tool_of("mcp__game__look", {"look", "go"}), tool_of("game_look", {"look"}), tool_of("overlook", {"look"})
    ('look', 'look', '')
    >>> tool_of("mcp__env__files_read", {"files.read"})
    'files.read'
    """
    if name in tools:
        return name
    ends = {tool: _wire_name(tool) for tool in tools}
    inner = [
        tool for tool, end in ends.items() if name == end or (name.endswith(end) and not name[-len(end) - 1].isalnum())
    ]
    return max(inner, key=len, default="")


@functools.cache
def _wire_name(tool: str) -> str:
    return NOT_IN_NAMES.sub("_", tool)


def _arguments_key(arguments: Mapping[str, JSON]) -> str:
    """Returns the key of arguments: a harness may have written 2.0 as 2."""
    return json.dumps(_plain(arguments), sort_keys=True)


def _plain(value: JSON) -> JSON:
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _final_reply(tree: ReplyTree, may_call: bool) -> SampledReply | None:
    """Returns the agent's final text: the newest reply that may be one, in the main conversation or with its tools.

    What an agent asks beside its task without a sign of it (after its last reply, Pi asks for a summary) has other
    tools or none.
    """
    roots = BranchRoots(tree)
    finals = [reply for reply in reversed(tree.replies) if _is_final(reply, may_call)]
    finals = [reply for reply in finals if not roots.side_label(reply.context.branch[-1])] or finals
    main = roots.main
    in_main = [
        reply
        for reply in finals
        if main is not None and (reply.context.root is main or reply.context.tools == main.tools)
    ]
    return next(iter(in_main or finals), None)


def _is_final(reply: SampledReply, may_call: bool) -> bool:
    """Returns whether a reply may be the agent's final text: one that it has received, and that no work follows.

    It may have calls if those are of the agent's own tools, of which one ends it (mini-swe-agent). An agent that has
    gone on with one reply, and then asks for another to the same request, begins again.
    """
    has_calls = bool(reply.message.tool_calls) and not may_call
    is_side = any(context.label in SIDE_LABELS for context in reply.context.branch)
    after = [context for context in reply.contexts if context.label not in SIDE_LABELS]
    is_left = bool(reply.contexts) and all(sample.is_lost for context in after for sample in context.replies)
    is_last = reply.is_open or (reply.answer is None and is_left)
    times = [sample.followed_at for sample in reply.context.replies if sample.followed_at is not None]
    is_new = reply.exclusion == "unused" and all(time <= reply.asked_at for time in times) and not reply.is_lost
    return is_last and not has_calls and not is_side and (is_new or reply.exclusion not in ("unused", "unseen"))
