"""The session of an outside agent that plays an episode: its requests, and which answers reached it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agentgym.errors import AgentGymError
from agentgym.rollout.serving.wires.response_store import ResponseStore
from agentgym.rollout.serving.wires.wire import AgentReply, AgentRequest
from agentgym.trajectory import Status, StopReason, Trajectory
from agentgym.types import JSON, Message, ToolSpec

__all__ = [
    "AgentExchange",
    "AgentGone",
    "AgentSession",
    "Answer",
    "EpisodeEnded",
    "FinishRequest",
    "Opening",
    "Replies",
    "StepAnswer",
    "StepRequest",
    "ToolAnswer",
    "ToolRequest",
]


NUM_KEPT = 8
"""The number of last requests whose answers are kept after the end, in case that they were lost."""


class AgentGone(AgentGymError, TimeoutError):
    """The agent of an episode has sent nothing for too long."""


class EpisodeEnded(AgentGymError, RuntimeError):
    """The episode is over."""

    def __init__(self, message: str, code: str = "episode_over") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (EpisodeEnded, (str(self), self.code))


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of an episode for an agent."""

    episode: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Gives a reply to the environment: the last one, or the one with `message`."""

    message: Message | None = None


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Ends the episode: the agent has ended, and its last reply is its final text, unless it failed."""

    failure: Status | None = None
    """The status of an episode whose agent crashed (`agent_error`) or took too long (`timeout`)."""
    error: str = ""
    """The line that names the failure."""
    is_exit: bool = False
    """True if the agent's process has exited: no call of its last reply is answered any more."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Calls a tool of the environment, which is one step of it."""

    name: str
    arguments: Mapping[str, JSON]
    key: str = ""
    """The name of the request, by which it is known if it is sent again; empty if it has none."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The environment's answer.

    `turn` is that of the reply it answers; `history`, if there is one, is the environment's replacement for the whole
    conversation.
    """

    messages: tuple[Message, ...]
    reward: float
    terminated: bool
    truncated: bool
    turn: int = 0
    history: tuple[Message, ...] | None = None


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The environment's answer to the call of a tool; `is_error` is True for a call that could not be run."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Replies:
    """The replies to a request for completions."""

    replies: tuple[AgentReply, ...]


Request: TypeAlias = "AgentRequest | StepRequest | FinishRequest | ToolRequest"
Answer: TypeAlias = "Replies | StepAnswer | ToolAnswer"


@dataclass(slots=True, eq=False)
class AgentExchange:
    """A request, and the answer to it."""

    key: str
    request: Request | None
    """The request; None when it is answered, as its messages are of no use any more."""
    future: asyncio.Future[Answer | AgentGymError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_lost: bool = False
    """True if the agent closed its connection before the last byte of the answer."""

    async def answer(self) -> Answer:
        """Returns the answer, or raises it; the agent's leaving does not cancel it."""
        try:
            answer = await asyncio.shield(self.future)
        except asyncio.CancelledError:
            self.is_lost = True
            raise
        if isinstance(answer, AgentGymError):
            raise answer
        return answer


class AgentSession:
    """The session of one episode's agent.

    The agent's side calls `ask`; the episode's side calls `next_exchange` and `close`. Several requests may be in
    flight. One that repeats another gets the recorded answer if the agent has not received it, or says that it retries:
    any other is a new sample, as best-of-n and equal sub-agents want it.
    """

    def __init__(self, name: str, label: str = "") -> None:
        self.name = name
        """The name of the episode for its agent: whoever knows it can play the episode."""
        self.label = label
        """The name without its secret."""
        self.claimed = asyncio.Event()
        self.ended = asyncio.Event()
        self.stored = ResponseStore()
        self.mcp_sessions: set[str] = set()
        """The MCP sessions that the agent has begun and not ended."""
        self._opening: asyncio.Future[Opening | AgentGymError] = asyncio.get_running_loop().create_future()
        self._exchanges: dict[str, list[AgentExchange]] = {}
        self._arrivals: asyncio.Queue[AgentExchange] = asyncio.Queue()
        self._status: Status | None = None
        self.end = EpisodeEnded("")
        """The answer to requests after the end."""

    @property
    def is_over(self) -> bool:
        """True if the episode has ended."""
        return self._status is not None

    # The agent's side

    async def opening(self) -> Opening:
        """Returns the start of the episode, once the environment is reset; raises EpisodeEnded if that failed."""
        opening = await asyncio.shield(self._opening)
        if isinstance(opening, AgentGymError):
            raise opening
        return opening

    def ask(self, request: Request, *, is_retry: bool = False) -> AgentExchange:
        """Returns the exchange of a request: a new one, or that of the request which it repeats."""
        key = getattr(request, "key", "") or type(request).__name__
        is_retry = is_retry or (isinstance(request, ToolRequest) and request.key != "")
        same = self._exchanges.setdefault(key, [])
        exchange = next((each for each in same if each.is_lost), same[-1] if is_retry and same else None)
        if exchange is not None and key != type(request).__name__:
            exchange.is_lost = False
            return exchange
        exchange = AgentExchange(key, request)
        if self._status is not None:
            exchange.future.set_result(self._after_the_end(request))
            return exchange
        same.append(exchange)
        self._arrivals.put_nowait(exchange)
        return exchange

    async def chat(self, request: AgentRequest) -> AgentReply:
        """Returns the first reply to a request; raises RequestRefused or EpisodeEnded."""
        answer = await self.ask(request).answer()
        assert isinstance(answer, Replies)
        return answer.replies[0]

    async def step(self, request: StepRequest | FinishRequest) -> StepAnswer:
        """Returns the environment's answer to a reply; raises RequestRefused or EpisodeEnded."""
        answer = await self.ask(request).answer()
        assert isinstance(answer, StepAnswer)
        return answer

    async def call_tool(self, request: ToolRequest) -> ToolAnswer:
        """Returns the environment's answer to a call; raises EpisodeEnded."""
        answer = await self.ask(request).answer()
        assert isinstance(answer, ToolAnswer)
        return answer

    def _after_the_end(self, request: Request) -> StepAnswer | EpisodeEnded:
        by_step = isinstance(request, StepRequest | FinishRequest)
        if by_step and self._status is not None and self._status.trainable:
            kinds = (StepRequest.__name__, FinishRequest.__name__)
            for exchange in (exchange for kind in kinds for exchange in reversed(self._exchanges.get(kind, ()))):
                answer = exchange.future.result() if exchange.future.done() else None
                if isinstance(answer, StepAnswer) and (answer.terminated or answer.truncated):
                    return answer  # a step that is repeated because its answer was lost
            is_completed = self._status is Status.COMPLETED
            return StepAnswer((), 0.0, is_completed, not is_completed)
        return self.end

    # The episode's side

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Shows the agent the start of the episode."""
        self._opening.set_result(Opening(self.name, tuple(messages), tuple(tools)))

    async def next_exchange(self) -> AgentExchange:
        """Returns the agent's next request."""
        return await self._arrivals.get()

    def forget(self, exchange: AgentExchange) -> None:
        """Forgets a request that was refused: sent again, it is looked at again."""
        self._exchanges[exchange.key].remove(exchange)

    def close(self, trajectory: Trajectory | None) -> None:
        """Ends the episode for its agent; None if it was given up. Answers that were lost can still be had."""
        status = Status.CANCELLED if trajectory is None else trajectory.status
        reason = StopReason.CANCELLED if trajectory is None else trajectory.stop_reason
        error = f": {trajectory.error}" if trajectory is not None and trajectory.error else ""
        self._status, self.end = status, EpisodeEnded(f"episode {self.name!r} is over ({reason}){error}", reason)
        if not self._opening.done():
            self._opening.set_result(self.end)
        for exchange in (exchange for same in self._exchanges.values() for exchange in same):
            if not exchange.future.done() and exchange.request is not None:
                exchange.future.set_result(self._after_the_end(exchange.request))
            exchange.request = None
        recent = [*self._exchanges][-NUM_KEPT:]
        self._exchanges = {
            key: same
            for key, same in self._exchanges.items()
            if key in recent or any(exchange.is_lost for exchange in same)
        }
        self.stored.clear()
        self.ended.set()
