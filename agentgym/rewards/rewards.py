"""Applies rewards to episodes: each as soon as it is over, or those of a step together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from agentgym.errors import ConfigError
from agentgym.rewards.config import RewardConfig
from agentgym.rewards.function import RewardCall, RewardFunction, find_reward
from agentgym.rewards.judge import Judge
from agentgym.rewards.learned import LearnedReward
from agentgym.rewards.local import LocalFunction
from agentgym.rewards.loop import RewardedLoop
from agentgym.rewards.overlong import OverlongConfig, with_overlong
from agentgym.rewards.pool import PoolJob, RewardPool
from agentgym.rewards.registry import wants_processes
from agentgym.rewards.remote import RemoteReward
from agentgym.rewards.reward import InvalidReward, Reward, RewardFailure, read_reward, rewarded, unrewarded
from agentgym.rewards.source import RewardSource
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.trajectory import Group, Trajectory

__all__ = ["Rewards", "open_rewards"]


class Rewards:
    """The rewards of a run; `open_rewards` makes one.

    A function that scores one episode is applied by `loop`, while other episodes still play. One that scores a step's
    episodes together (`together`) is applied by `score`, to all of them.
    """

    def __init__(self, source: RewardSource | None, overlong: OverlongConfig) -> None:
        self._source = source
        self._overlong = overlong
        self._free = asyncio.Semaphore(source.num_at_once if source is not None else 1)

    @property
    def together(self) -> bool:
        """Whether the episodes of a step are to be given to `score`; `loop` then scores nothing."""
        return self._source is not None and self._source.together

    def loop(self, inner: EpisodeLoop) -> EpisodeLoop:
        """A loop that plays as `inner` does and scores each episode at its end; `inner` where nothing is to do."""
        changes_nothing = self._source is None and not self._overlong.buffer_tokens
        return inner if self.together or changes_nothing else RewardedLoop(inner, self._score_one)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with their rewards, in their order; those that have failed stay as they are.

        An episode whose reward fails ends as `env_error`. To score once more replaces the reward once more.
        """
        if not self.together:
            return await _all_of([self._score_one(one) for one in trajectories])
        played = [index for index, one in enumerate(trajectories) if one.status.trainable]
        scored = await self._ask([trajectories[index] for index in played]) if played else []
        result = list(trajectories)
        for index, value in zip(played, scored, strict=True):
            result[index] = self._apply(trajectories[index], value)
        return result

    async def score_groups(self, groups: Sequence[Group]) -> list[Group]:
        """`score`, for the groups of a step."""
        scored = iter(await self.score([one for group in groups for one in group.trajectories]))
        return [replace(group, trajectories=tuple(next(scored) for _ in group.trajectories)) for group in groups]

    async def close(self) -> None:
        """Ends processes, connections and threads; a second call does nothing."""
        if self._source is not None:
            await self._source.close()

    async def _score_one(self, trajectory: Trajectory) -> Trajectory:
        if not trajectory.status.trainable:
            return trajectory
        return self._apply(trajectory, (await self._ask([trajectory]))[0])

    async def _ask(self, trajectories: Sequence[Trajectory]) -> Sequence[object]:
        """A value or a RewardFailure for each."""
        if self._source is None:
            return [_environment_reward(one) for one in trajectories]
        async with self._free:
            try:
                return await self._source.score(trajectories)
            except RewardFailure as failure:
                return [failure] * len(trajectories)

    def _apply(self, trajectory: Trajectory, value: object) -> Trajectory:
        if isinstance(value, RewardFailure):
            return unrewarded(trajectory, value)
        try:
            return rewarded(trajectory, with_overlong(read_reward(value), trajectory, self._overlong))
        except InvalidReward as error:
            return unrewarded(trajectory, RewardFailure.of(error))


@asynccontextmanager
async def open_rewards(config: RewardConfig, function: RewardFunction | None = None) -> AsyncIterator[Rewards]:
    """The rewards of `config`, or of a function given in Python in place of the configuration's.

    Raises ConfigError, UnknownName or RunFolderError, before any episode is played, for what can give no reward.
    """
    source = await _open_source(config, function)
    rewards = Rewards(source, config.overlong)
    try:
        yield rewards
    finally:
        await rewards.close()


async def _open_source(config: RewardConfig, function: RewardFunction | None) -> RewardSource | None:
    if function is not None or config.function is not None:
        return await _open_function(config, function)
    if not config.given:
        if config.manner != "auto" or config.settings:
            raise ConfigError(
                f"a reward with manner={config.manner} and settings needs a function, a server or a model"
            )
        return None
    if config.settings and config.given != ("remote",):
        raise ConfigError(f"reward.settings are those of a function or a server; a {config.given[0]} has its own")
    if config.given == ("model",):
        learned = LearnedReward(config.model, config.timeout_s)
        await learned.open()
        return learned
    if config.given == ("judge",):
        return Judge(config.judge, config.num_calls())
    return RemoteReward(config.remote, config.settings, config.num_calls())


async def _open_function(config: RewardConfig, function: RewardFunction | None) -> RewardSource:
    name = config.function
    if function is not None and config.given:
        raise ConfigError(
            f"an episode has one reward, got a function in Python and the {config.given[0]} of the settings"
        )
    if function is not None and config.manner == "pool":
        raise ConfigError("processes of a pool load their function by name: give 'path/to/file.py:name'")
    named = name is not None and ":" not in name
    pooled = config.manner == "auto" and named and name is not None and wants_processes(find_reward(name))
    if name is not None and (config.manner == "pool" or pooled):
        job = PoolJob(function=name, settings=config.settings, timeout_s=config.timeout_s, memory_mb=config.memory_mb)
        pool = RewardPool(job, config.num_calls(in_processes=True))
        await pool.open()
        return pool
    found = find_reward(name) if name is not None else function
    assert found is not None
    call = RewardCall.of(found, config.settings, name=name or "", batch=config.manner == "batch")
    return LocalFunction(call, timeout_s=config.timeout_s, num_at_once=config.num_calls())


def _environment_reward(trajectory: Trajectory) -> Reward:
    turns = tuple(turn.reward or 0.0 for turn in trajectory.turns)
    return Reward(trajectory.reward or 0.0, turns=turns)


async def _all_of(scorings: Sequence[Coroutine[object, object, Trajectory]]) -> list[Trajectory]:
    """Their results; when one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in scorings]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
