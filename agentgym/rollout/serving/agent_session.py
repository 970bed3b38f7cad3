"""The session of an outside agent that plays an episode: requests come one at a time, each is answered once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentgym.errors import AgentGymError
from agentgym.rollout.serving.chat_completion import ChatCompletion, ChatRequest
from agentgym.trajectory import Status, StopReason, Trajectory
from agentgym.types import Message, ToolSpec

__all__ = [
    "AgentGone",
    "AgentSession",
    "EpisodeEnded",
    "Opening",
    "RequestRefused",
    "SessionBusy",
    "StepAnswer",
    "StepRequest",
]


class AgentGone(AgentGymError, TimeoutError):
    """The agent of an episode has sent nothing for too long."""


class RequestRefused(AgentGymError, ValueError):
    """A request that cannot be played; the episode continues as if it had not been made."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (RequestRefused, (str(self), self.code, self.param))


class SessionBusy(AgentGymError, RuntimeError):
    """Another request of the episode is in flight: an episode has one agent, which waits for its answers."""


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
    """Gives the last reply to the environment; `message`, if there is one, must be that reply."""

    message: Message | None = None


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


AgentRequest: TypeAlias = "ChatRequest | StepRequest"
Answered: TypeAlias = "ChatCompletion | StepAnswer"


class AgentSession:
    """The session of one episode's agent.

    The agent's side calls `chat` and `step`; the episode's side calls `next_request` and `answer`. A request that
    repeats the one in flight, or the last one that was answered, gets that one's answer: an agent that lost its
    connection asks again, and nothing is sampled or stepped twice.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.claimed = asyncio.Event()
        self._opening: asyncio.Future[Opening | AgentGymError] = asyncio.get_running_loop().create_future()
        self._current: tuple[str, AgentRequest, asyncio.Future[Answered | AgentGymError]] | None = None
        self._last: tuple[str, Answered] | None = None
        self._arrived = asyncio.Event()
        self._status: Status | None = None
        self._end = EpisodeEnded("")

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

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Returns the reply to a request; raises RequestRefused, SessionBusy or EpisodeEnded."""
        answer = await self._ask(request.key, request)
        assert isinstance(answer, ChatCompletion)
        return answer

    async def step(self, request: StepRequest) -> StepAnswer:
        """Returns the environment's answer to the last reply; raises RequestRefused, SessionBusy or EpisodeEnded."""
        answer = await self._ask("step", request)
        assert isinstance(answer, StepAnswer)
        return answer

    async def _ask(self, key: str, request: AgentRequest) -> Answered:
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if self._current is None:
            if self._status is not None:
                return self._after_the_end(request)
            self._current = (key, request, asyncio.get_running_loop().create_future())
            self._arrived.set()
        elif self._current[0] != key:
            raise SessionBusy(f"episode {self.name!r} is at another request: an episode is played by one agent")
        answer = await asyncio.shield(self._current[2])  # an agent that disconnects does not cancel the answer
        if isinstance(answer, AgentGymError):
            raise answer
        return answer

    def _after_the_end(self, request: AgentRequest) -> StepAnswer:
        if isinstance(request, StepRequest) and self._status is not None and self._status.trainable:
            is_completed = self._status is Status.COMPLETED
            return StepAnswer((), 0.0, is_completed, not is_completed)
        raise self._end

    # The episode's side

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Shows the agent the start of the episode."""
        self._opening.set_result(Opening(self.name, tuple(messages), tuple(tools)))

    async def next_request(self, idle_s: float) -> AgentRequest:
        """Returns the agent's next request; raises AgentGone if there is none for `idle_s` seconds."""
        try:
            async with asyncio.timeout(idle_s):
                await self._arrived.wait()
        except TimeoutError:
            raise AgentGone(f"the agent asked for nothing within {idle_s:g} s (idle_s)") from None
        self._arrived.clear()
        assert self._current is not None
        return self._current[1]

    def answer(self, answer: Answered | AgentGymError) -> None:
        """Answers the current request; an error is raised in the agent's call."""
        assert self._current is not None
        (key, _, future), self._current = self._current, None
        if not isinstance(answer, AgentGymError):
            self._last = (key, answer)
        future.set_result(answer)

    def close(self, trajectory: Trajectory | None) -> None:
        """Ends the episode for its agent; None if it was given up."""
        status = Status.CANCELLED if trajectory is None else trajectory.status
        reason = StopReason.CANCELLED if trajectory is None else trajectory.stop_reason
        error = f": {trajectory.error}" if trajectory is not None and trajectory.error else ""
        self._status, self._end = status, EpisodeEnded(f"episode {self.name!r} is over ({reason}){error}", reason)
        if not self._opening.done():
            self._opening.set_result(self._end)
        if self._current is not None:
            try:
                self.answer(self._after_the_end(self._current[1]))
            except EpisodeEnded as ended:
                self.answer(ended)
