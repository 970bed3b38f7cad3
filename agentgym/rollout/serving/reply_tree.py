"""The replies of a served episode as a tree: each continues the conversation that its request has as a prefix."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentgym.engines.protocol import Completion
from agentgym.rollout.episode.token_loop import NextPrompt
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.serving.agent_session import AgentExchange, StepAnswer
from agentgym.rollout.serving.reply_pieces import join_replies
from agentgym.rollout.serving.visible_messages import AgentView
from agentgym.rollout.serving.wires.wire import AgentRequest, UnreadableCall, json_digest, tools_digest, turn_name
from agentgym.trajectory import Turn
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

__all__ = ["Context", "Place", "ReplyTree", "SampledReply", "next_context", "root_context", "texts_without_ids"]

MAX_KEY = 256
"""The most characters of a message that the tree keeps to know it by; a longer one is known by its digest."""


@dataclass(slots=True, eq=False)
class Context:
    """The messages before a reply: replies to equal requests are samples of one context."""

    parent: SampledReply | None
    """The reply that the messages continue; None for those that begin with a render of their own."""
    key: str
    """The name of the context in seeds, the same in whatever order requests arrive; empty where the environment alone
    has answered all replies before it."""
    messages: tuple[Message, ...]
    """All messages, as the policy is shown them."""
    tools: tuple[ToolSpec, ...]
    ids: tuple[int, ...]
    """The ids after the parent's reply, or the whole prompt if `begins_row`."""
    begins_row: bool = True
    answer: EnvStep = field(default_factory=lambda: EnvStep("", ()))
    """What answers the parent's reply."""
    is_env: bool = False
    """True if the environment gave the answer, or the opening."""
    before: SampledReply | None = None
    """The last reply of ours that a context without a parent has among its messages, changed or with other tools."""
    label: str = ""
    """The kind of the branch, where the agent's headers give it."""
    client: str = ""
    """The dialect of the first request, and the program that sent it."""
    replies: list[SampledReply] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    """The number of samples that were asked for, by the settings of their requests."""
    depth: int = field(init=False)
    """The number of replies before."""

    def __post_init__(self) -> None:
        self.depth = 0 if self.parent is None else self.parent.context.depth + 1

    @property
    def branch(self) -> list[Context]:
        """The contexts of the conversation, this one first."""
        contexts = [self]
        while (parent := contexts[-1].parent) is not None:
            contexts.append(parent.context)
        return contexts

    @property
    def root(self) -> Context:
        """The first context of the agent's conversation, whatever the agent changed in it since."""
        context = self
        while (reply := context.parent or context.before) is not None:
            context = reply.context
        return context

    def prompt(self) -> list[int]:
        """Returns all ids before the reply."""
        parts: list[Sequence[int]] = []
        context = self
        while True:
            parts.append(context.ids)
            if context.begins_row or context.parent is None:
                break
            parts.append(context.parent.completion.ids)
            context = context.parent.context
        ids: list[int] = []
        for part in reversed(parts):
            ids.extend(part)
        return ids


@dataclass(slots=True, eq=False)
class SampledReply:
    """A reply that was sampled."""

    context: Context
    number: int
    """The position of the reply in the episode, in time."""
    branch: str
    """The name of the reply in seeds; empty where the environment alone has answered all replies before it."""
    session: str
    """The engine's session."""
    completion: Completion
    message: Message
    shown: Message
    """The message as the agent sees it."""
    turn: Turn
    view: AgentView
    """What the agent is shown of its calls."""
    agent: str = ""
    """The conversation that asked for it, where the agent's headers name it."""
    asked_at: int = 0
    """The number of replies that were asked for before."""
    excluded: str = ""
    node: Node = field(init=False)
    contexts: list[Context] = field(default_factory=list)
    """The conversations that continue it."""
    followed_at: int | None = None
    """The number of replies that were asked for when a request had it, or the environment answered it; None if neither
    did."""
    step: StepAnswer | None = None
    answer: EnvStep | None = None
    """The environment's answer."""
    tool_answers: dict[int, EnvStep] = field(default_factory=dict)
    """The environment's answers to calls that came over MCP, by the position of the call in the reply."""
    loose_reward: float = 0.0
    """The rewards of calls over MCP that no reply made."""
    exchange: AgentExchange | None = None

    def __post_init__(self) -> None:
        self.node = Node(self)

    @property
    def is_followed(self) -> bool:
        """True if a later request has it, or the environment answered it."""
        return self.followed_at is not None

    def follow(self, when: int) -> None:
        """Notes that a request has it, or that the environment answered it."""
        self.followed_at = when if self.followed_at is None else self.followed_at

    @property
    def is_open(self) -> bool:
        """True if nothing has answered it."""
        return self.answer is None and not self.is_followed and not self.tool_answers

    @property
    def is_lost(self) -> bool:
        """True if the agent closed its connection before it had the reply."""
        return self.exchange is not None and self.exchange.is_lost

    @property
    def exclusion(self) -> str:
        """The reason why it is in no loss; empty if it is in one."""
        if self.excluded or self.is_followed:
            return self.excluded
        if any(sample.is_followed and sample.agent == self.agent for sample in self.context.replies):
            return "unused"
        return "unseen" if self.is_lost else ""

    def prompt(self) -> list[int]:
        """Returns all ids up to its end."""
        return [*self.context.prompt(), *self.completion.ids]


class Node:
    """A message of the conversations that agents have sent or were shown."""

    __slots__ = ("children", "context", "reply")

    def __init__(self, reply: SampledReply | None = None) -> None:
        self.children: dict[Hashable, Node] = {}
        self.context: Context | None = None
        """The context that ends here."""
        self.reply = reply
        """The reply that the message is."""


class Place(NamedTuple):
    """The place of a request in the tree."""

    node: Node
    """The node of its last message."""
    anchor: SampledReply | None
    """The last reply of ours in the longest prefix that is known."""
    new: tuple[Message, ...]
    """The messages after it, with its own ids and names of calls."""


class ReplyTree:
    """Finds the branch that a request continues, in time that grows with its messages alone.

    A message is known by its role and content. A reply of ours is known by the turn that its calls' ids or its sealed
    reasoning name, whatever a harness made of its arguments, else by its content and calls.
    """

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self.contexts: list[Context] = []
        """The contexts without a parent, in the order of their first requests."""
        self.replies: list[SampledReply] = []
        self.calls: list[Turn] = []
        """The calls over MCP before the first reply, with their answers."""
        self.num_asked = 0
        """The number of replies that were asked for."""
        self.num_tokens = 0
        """The number of ids of all rows."""

    def find(self, request: AgentRequest) -> Place:
        """Returns the place of a request."""
        return self._walk(request.messages, request.turns, self._root(request.tools_key))

    def find_before(self, request: AgentRequest, place: Place) -> SampledReply | None:
        """Returns the last reply of ours among the messages of a request that continues none, whatever its tools."""
        if place.anchor is not None:
            return place.anchor
        others = [root for key, root in self._roots.items() if key != request.tools_key]
        anchors = (self._walk(request.messages, request.turns, root, adds=False).anchor for root in others)
        return max(filter(None, anchors), key=lambda reply: reply.number, default=None)

    def read(self, request: AgentRequest) -> AgentRequest:
        """Returns a request whose replies are one message each, however the agent has divided them."""
        turns = request.turns or ("",) * len(request.messages)
        messages, turns = join_replies(request.messages, turns, self._text_of)
        return replace(request, messages=messages, turns=turns)

    def _text_of(self, turn: str) -> str:
        return next((reply.shown.content for reply in self.replies if turn_name(reply.number) == turn), "")

    def _root(self, tools_key: str) -> Node:
        return self._roots.setdefault(tools_key, Node())

    def _walk(self, messages: Sequence[Message], turns: Sequence[str], node: Node, *, adds: bool = True) -> Place:
        """Returns the place of messages below a node; what is not there is added, or ends the walk."""
        anchor: SampledReply | None = None
        num_old = 0
        calls: dict[str, int] = {}
        for index, (message, turn) in enumerate(zip(messages, turns, strict=True)):
            key = message_key(message, calls)
            child = (node.children.get(turn) if turn else None) or node.children.get(key)
            if child is None and not adds:
                break
            child = child or node.children.setdefault(key, Node())
            if message.role == "assistant":
                calls = {call.id: position for position, call in enumerate(message.tool_calls)}
            if child.reply is not None:
                anchor, num_old = child.reply, index + 1
            node = child
        new = messages[num_old:] if anchor is None else _with_own_ids(messages, num_old, anchor)
        return Place(node, anchor, tuple(new))

    def add(self, context: Context) -> None:
        """Adds a context: its ids count from now on, and its parent is followed."""
        parent = context.parent
        if parent is None:
            self.contexts.append(context)
        else:
            if parent.contexts and not context.begins_row:
                self.num_tokens += len(parent.prompt())  # the row of a fork has what it shares
            parent.contexts.append(context)
            parent.follow(self.num_asked)
        self.num_tokens += len(context.ids)

    def add_opening(
        self,
        messages: Sequence[Message],
        views: Sequence[Message],
        tools: tuple[ToolSpec, ...],
        ids: Sequence[int],
    ) -> None:
        """Adds the environment's opening, as the agent is shown it."""
        context = Context(None, "", tuple(messages), tools, tuple(ids), is_env=True)
        self.add(context)
        self._walk(views, ("",) * len(views), self._root(tools_digest(tools))).node.context = context

    def show(self, context: Context, parent: SampledReply, views: Sequence[Message], *, is_whole: bool) -> None:
        """Makes a context known by the messages that the agent was shown after a reply, or as a whole conversation."""
        if is_whole:
            root = self._root(tools_digest(context.tools))
            self._walk(views, ("",) * len(views), root).node.context = context
            return
        node, calls = parent.node, {call.id: index for index, call in enumerate(parent.shown.tool_calls)}
        for message in views:
            node = node.children.setdefault(message_key(message, calls), Node())
        node.context = context

    def add_call(self, turn: Turn) -> None:
        """Adds a call over MCP that no reply made."""
        if self.replies:
            self.replies[-1].loose_reward += turn.reward or 0.0
        else:
            self.calls.append(turn)

    def ask(self, context: Context, request: AgentRequest) -> str:
        """Returns the branch of the context's next sample, by which its seed is derived."""
        self.num_asked += 1
        ordinal = context.asked[request.settings_key]
        context.asked[request.settings_key] += 1
        if not (context.key or request.settings_key or ordinal):
            return ""
        return json_digest([context.key, request.settings_key, ordinal])

    def add_reply(self, reply: SampledReply, known_at: Node) -> None:
        """Adds a reply; it is known by its turn, and by its content unless an equal one is."""
        context = reply.context
        if context.replies:
            self.num_tokens += len(context.prompt())
        context.replies.append(reply)
        self.replies.append(reply)
        self.num_tokens += len(reply.completion.ids)
        known_at.children[turn_name(reply.number)] = reply.node
        known_at.children.setdefault(message_key(reply.shown, {}), reply.node)


def root_context(
    request: AgentRequest, messages: tuple[Message, ...], ids: Sequence[int], before: SampledReply | None
) -> Context:
    """Returns a context with a render of its own."""
    key = json_digest([request.tools_key, [content_key(message) for message in messages]])
    label, client = request.label, request.client
    return Context(None, key, messages, request.tools, tuple(ids), before=before, label=label, client=client)


def next_context(
    parent: SampledReply, messages: Sequence[Message], prompt: NextPrompt, answer: EnvStep, *, is_env: bool = False
) -> Context:
    """Returns a context that continues a reply."""
    is_plain = is_env and not parent.branch
    names = [content_key(message) for message in answer.messages]
    key = "" if is_plain else json_digest([parent.branch, parent.context.depth, names])
    tools, ids = parent.context.tools, tuple(prompt.ids)
    return Context(parent, key, tuple(messages), tools, ids, prompt.begins_row, answer, is_env=is_env)


def content_key(message: Message) -> list[object]:
    """Returns what a message says, without ids, as JSON."""
    return [message.role, message.content.strip(), texts_without_ids(message)]


def message_key(message: Message, calls: dict[str, int]) -> Hashable:
    """Returns the key by which a message is known; `calls` are the positions of the calls that results answer."""
    content, others = message.content, texts_without_ids(message)
    if message.role == "assistant":
        content = content.strip()
    position = calls.get(message.tool_call_id or "", -1) if message.role == "tool" else -1
    texts = (content, *others)
    if sum(map(len, texts)) > MAX_KEY:
        texts = (json_digest(texts),)
    return (message.role, position, *texts)


def texts_without_ids(message: Message) -> list[str]:
    """Returns the calls of a message without their ids, as texts that are equal for equal calls."""
    texts = []
    for call in message.tool_calls:
        if isinstance(call, MalformedCall):
            texts.append(call.arguments if isinstance(call, UnreadableCall) else call.raw)
        else:
            texts.append(f"{call.name} {json.dumps(call.arguments, sort_keys=True, default=dict)}")
    return texts


def _with_own_ids(messages: Sequence[Message], start: int, anchor: SampledReply) -> list[Message]:
    """Returns the messages from `start` on; results of the anchor's calls have its ids, and the names of its tools."""
    positions = {call.id: index for index, call in enumerate(messages[start - 1].tool_calls)}
    own = anchor.shown.tool_calls
    renamed: list[Message] = []
    for message in messages[start:]:
        if message.role == "assistant":
            positions = {}
        position = positions.get(message.tool_call_id or "", len(own))
        if position < len(own):
            call = own[position]
            name = call.name if isinstance(call, ToolCall) else None
            message = replace(message, tool_call_id=call.id, name=name)
        renamed.append(message)
    return renamed
