"""A reward function that looks into the environment, called where that is before it is closed."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentgym.errors import CODE_ERRORS, is_interrupt
from agentgym.rewards.function import RewardCall
from agentgym.rewards.reward import Reward, RewardFailure, UnusableReward, read_optional_reward
from agentgym.trajectory import Trajectory

if TYPE_CHECKING:
    from agentgym.rollout.hosting.hosted_env import Env

__all__ = ["RewardInEnvironment"]


@dataclass(frozen=True, slots=True)
class RewardInEnvironment:
    """The call of a function for one episode, for `HostedEnv.apply`; it can be pickled if the function has a name."""

    call: RewardCall
    trajectory: Trajectory

    async def __call__(self, env: Env) -> Reward | RewardFailure | UnusableReward | None:
        """Returns the reward, None if it does not apply, or the error as a value, which every process can read."""
        try:
            result = self.call([self.trajectory], env.unwrapped)
            return read_optional_reward(await result if inspect.isawaitable(result) else result)
        except UnusableReward as error:
            return error
        except CODE_ERRORS as error:  # the boundary around the user's reward function
            if is_interrupt(error):
                raise
            return RewardFailure.of(error)
