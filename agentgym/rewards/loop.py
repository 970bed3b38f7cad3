"""An episode loop that scores each episode as soon as it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import SURPLUS, EpisodeLoop
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.trajectory import Status, StopReason, Trajectory

__all__ = ["RewardedLoop"]


class RewardedLoop(EpisodeLoop):
    """Plays as `inner` does; then `score` computes the trajectory's reward, while other episodes still play.

    The time of scoring does not count for the episode: `limits.deadline_s` covers only its play.
    """

    def __init__(self, inner: EpisodeLoop, score: Callable[[Trajectory, HostedEnv], Awaitable[Trajectory]]) -> None:
        super().__init__(inner.limits)
        self.inner = inner
        self.env_host = inner.env_host
        self.fair_gate = inner.fair_gate
        self.end_thinking = inner.end_thinking
        self._score = score

    async def play(self, env: HostedEnv, episode: Episode) -> Trajectory:
        """Plays and scores one episode; see `EpisodeLoop.play`."""
        trajectory = await self.inner.play(env, episode)
        try:
            return await self._score(trajectory, env)
        except asyncio.CancelledError as error:
            if SURPLUS not in error.args:
                raise
            line = "enough groups were finished without it"
            return replace(
                trajectory, status=Status.CANCELLED, stop_reason=StopReason.CANCELLED, error=trajectory.error or line
            )

    async def close(self) -> None:
        """Closes the inner loop; the code that opened the rewards closes them."""
        await self.inner.close()

    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        return await self.inner._converse(env, builder)

    async def _end_session(self, session: str) -> None:
        await self.inner._end_session(session)
