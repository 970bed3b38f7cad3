"""Reward functions in this process: blocking ones run on threads, the others on the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence

from agentgym.errors import CODE_ERRORS, ConfigError, EnvironmentFault, is_interrupt
from agentgym.rewards.function import RewardCall
from agentgym.rewards.in_environment import RewardInEnvironment
from agentgym.rewards.reward import Reward, RewardFailure, UnusableReward
from agentgym.rollout.hosting.env_code import attempt
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.tools.calling.worker import Worker
from agentgym.trajectory import Trajectory

__all__ = ["LocalFunction"]


class LocalFunction:
    """The rewards of a function. A call over `timeout_s` fails; its thread ends as soon as it returns, or never.

    Code that holds Python's lock for long (a regular expression that backtracks) blocks everything: use a pool for it.
    """

    def __init__(self, call: RewardCall, *, timeout_s: float, num_at_once: int) -> None:
        self.call = call
        self.timeout_s = timeout_s
        self._num_at_once = num_at_once
        self._idle: list[Worker] = []

    @property
    def together(self) -> bool:
        return self.call.together

    @property
    def num_at_once(self) -> int:
        return self._num_at_once

    @property
    def takes_environment(self) -> bool:
        return self.call.takes_environment

    async def score(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        if self.takes_environment:
            return [await self._score_in(env, trajectories[0])]
        worker = self._idle.pop() if self._idle else Worker("agentgym-reward")
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                error, result = await worker.run(lambda: attempt(lambda: self.call(trajectories)))
                if error is not None:
                    raise error if isinstance(error, UnusableReward) else RewardFailure.of(error)
                if inspect.isawaitable(result):
                    result = await result
            return self.call.values(result, len(trajectories))
        except (RewardFailure, UnusableReward):
            raise
        except CODE_ERRORS as error:  # the boundary around the user's reward function
            if is_interrupt(error):
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                raise RewardFailure(
                    f"{self.call.name} gave no reward within {self.timeout_s:g} s (reward.timeout_s)"
                ) from None
            raise RewardFailure.of(error) from error
        finally:
            self._idle.append(worker)  # an abandoned worker starts another thread

    async def _score_in(self, env: HostedEnv | None, trajectory: Trajectory) -> Reward | None:
        """Calls the function in the place of the episode's environment."""
        if env is None:
            raise ConfigError(
                f"reward {self.call.name!r} takes the environment, and recorded episodes have none any more: it scores"
                " episodes while they are played"
            )
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await env.apply(RewardInEnvironment(self.call, trajectory))
        except (TimeoutError, EnvironmentFault) as error:  # EnvCallTimeout too
            words = str(error) or f"it gave no reward within {self.timeout_s:g} s (reward.timeout_s)"
            raise RewardFailure(f"{self.call.name}: {words}") from None
        if result is None or isinstance(result, Reward):
            return result
        raise result

    async def close(self) -> None:
        for worker in self._idle:
            worker.stop()
        self._idle.clear()
