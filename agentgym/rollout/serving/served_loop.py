"""Brings episodes and outside agents together: an episode waits until an agent claims it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque

from agentgym.errors import ConfigError
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.serving.agent_session import AgentSession, EpisodeEnded, Opening
from agentgym.rollout.serving.conversation_loop import ConversationLoop
from agentgym.rollout.serving.wires.wire import AgentRequest
from agentgym.trajectory import BRANCH_LABELS, Trajectory

__all__ = ["ServedLoop"]

logger = logging.getLogger(__name__)

MAX_KEPT = 4096
"""The number of finished episodes whose last answers can still be requested."""


class ServedLoop(ConversationLoop):
    """A ConversationLoop for agents that come by themselves and claim an episode each.

    An agent that only passes on what it gets leaves exactly the record of a RolloutLoop. One may ask several times
    before it steps: such a reply is a turn with reward 0. An agent that sends nothing for `idle_s` seconds is gone, and
    its episode ends with the status `timeout`.
    """

    def __init__(
        self,
        loop: RolloutLoop,
        *,
        idle_s: float = 120.0,
        credit: tuple[str, ...] = BRANCH_LABELS,
    ) -> None:
        """Plays with the engine, renderer and limits of `loop`.

        Replies of branches whose label is not in `credit` are in no loss.
        """
        if not idle_s > 0:
            raise ConfigError(f"idle_s must be greater than 0, got {idle_s}")
        if loop.compaction.at is not None:
            raise ConfigError(
                "an agent outside keeps its own conversation, and shortens it itself: leave compaction.at out, or play "
                "the episodes here (without --serve)"
            )
        super().__init__(loop.engine, loop.renderer, loop.limits, loop.sampling, history=loop.history)
        self.idle_s, self.credit = idle_s, credit
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
        label = episode.session.replace("/", ".")
        session = AgentSession(f"{label}-{secrets.token_urlsafe(16)}", label)
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

    def _session_of(self, episode: Episode) -> AgentSession:
        return self._live[episode.session]

    def _warn_of_fields(self, request: AgentRequest) -> None:
        notes = request.notes
        for name in {*notes.ignored} - self._warned_fields:
            logger.warning("an agent sends the field %r, which is unknown here and ignored", name)
        for name in {*notes.left_out} - self._warned_fields:
            logger.warning("an agent sends %s, which only its provider's servers can run; it is left out", name)
        for name in {*notes.decided} - self._warned_fields:
            logger.warning(
                "an agent sets %s, which plays no role: replies are sampled as the run says (temperature %g), or they "
                "could not be trained on",
                name,
                self.sampling.temperature,
            )
        self._warned_fields |= {*notes.ignored, *notes.left_out, *notes.decided}
