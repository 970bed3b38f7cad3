"""Applies rewards to episodes: to each as soon as it is over, or to those of a step together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from agentgym.errors import ConfigError
from agentgym.rewards.config import RewardConfig
from agentgym.rewards.function import RewardCall, RewardFunction, find_reward
from agentgym.rewards.judge.judge import Judge
from agentgym.rewards.learned import LearnedReward
from agentgym.rewards.local import LocalFunction
from agentgym.rewards.loop import RewardedLoop
from agentgym.rewards.overlong import OverlongConfig, with_overlong
from agentgym.rewards.pool import PoolJob, RewardPool
from agentgym.rewards.registry import wants_processes
from agentgym.rewards.remote import RemoteReward
from agentgym.rewards.reward import (
    InvalidReward,
    Reward,
    RewardFailure,
    RewardSource,
    apply_failure,
    apply_reward,
    read_reward,
)
from agentgym.rewards.weighted import WeightedPart, WeightedRewards
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.rollout.hosting.hosted_env import HostedEnv
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
        """True if `score` takes all episodes of a step; `loop` then scores nothing."""
        return self._source is not None and self._source.together

    def loop(self, inner: EpisodeLoop) -> EpisodeLoop:
        """Returns a loop that plays as `inner` and scores each episode at its end, or `inner` if there is no reward."""
        if self._source is not None and self._source.takes_environment and not inner.has_environment:
            raise ConfigError(
                "the reward takes the environment, which is on another machine: leave environment out of its parameters"
            )
        changes_nothing = self._source is None and not self._overlong.buffer_tokens
        return inner if self.together or changes_nothing else RewardedLoop(inner, self._score_one)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns the trajectories with their rewards, in their order; failed ones stay as they are.

        An episode whose reward fails ends as `env_error`. Scoring again replaces the reward again.
        """
        if not self.together:
            return await _all_of([self._score_one(trajectory) for trajectory in trajectories])
        played = [index for index, trajectory in enumerate(trajectories) if trajectory.status.trainable]
        scored = await self._ask([trajectories[index] for index in played]) if played else []
        result = list(trajectories)
        for index, value in zip(played, scored, strict=True):
            result[index] = self._apply(trajectories[index], value)
        return result

    def check_alone(self) -> None:
        """Raises ConfigError unless each episode is scored alone, without its environment."""
        if self.together:
            raise ConfigError("this reward compares the episodes of a step, and `of` scores one: use it in training")
        if self._source is not None and self._source.takes_environment:
            raise ConfigError("this reward takes the environment, which is not at hand: leave environment out")

    async def of(self, trajectory: Trajectory) -> Reward:
        """Returns the reward of an episode that is scored alone; raises RewardFailure or InvalidReward without one."""
        (value,) = await self._ask([trajectory])
        return read_reward(value)

    async def score_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Calls `score` for the groups of a step."""
        scored = iter(await self.score([trajectory for group in groups for trajectory in group.trajectories]))
        return [replace(group, trajectories=tuple(next(scored) for _ in group.trajectories)) for group in groups]

    async def close(self) -> None:
        """Ends processes, connections and threads; a second call does nothing."""
        if self._source is not None:
            await self._source.close()

    async def _score_one(self, trajectory: Trajectory, env: HostedEnv | None = None) -> Trajectory:
        if not trajectory.status.trainable:
            return trajectory
        return self._apply(trajectory, (await self._ask([trajectory], env))[0])

    async def _ask(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        """Returns a value or a RewardFailure for each trajectory."""
        if self._source is None:
            return [_environment_reward(trajectory) for trajectory in trajectories]
        async with self._free:
            try:
                return await self._source.score(trajectories, env)
            except RewardFailure as failure:
                return [failure] * len(trajectories)

    def _apply(self, trajectory: Trajectory, value: object) -> Trajectory:
        try:
            return apply_reward(trajectory, with_overlong(read_reward(value), trajectory, self._overlong))
        except RewardFailure as failure:
            return apply_failure(trajectory, failure)
        except InvalidReward as error:
            return apply_failure(trajectory, RewardFailure.of(error))


@asynccontextmanager
async def open_rewards(config: RewardConfig, function: RewardFunction | None = None) -> AsyncIterator[Rewards]:
    """Opens the rewards of `config`, or of a Python function in place of the configuration's.

    Raises ConfigError, UnknownName or RunFolderError, before any episode is played, if no reward can be computed.
    """
    source = await _open_source(config, function)
    rewards = Rewards(source, config.overlong)
    try:
        yield rewards
    finally:
        await rewards.close()


async def _open_source(config: RewardConfig, function: RewardFunction | None) -> RewardSource | None:
    if config.is_weighted:
        if function is not None:
            raise ConfigError("an episode has one reward, got a function in Python and those of the settings")
        return await _open_weighted(config)
    if function is not None or config.function is not None:
        return await _open_function(config, function)
    if not config.source_names:
        if config.manner != "auto" or config.settings:
            raise ConfigError(
                f"a reward with manner={config.manner} and settings needs a function, a server or a model"
            )
        return None
    if config.settings and config.source_names != ("remote",):
        raise ConfigError(
            f"reward.settings are those of a function or a server; a {config.source_names[0]} has its own"
        )
    if config.source_names == ("model",):
        learned = LearnedReward(config.model, config.timeout_s)
        await learned.open()
        return learned
    if config.source_names == ("judge",):
        return Judge(config.judge, config.num_calls())
    return RemoteReward(config.remote, config.settings, config.num_calls())


async def _open_weighted(config: RewardConfig) -> RewardSource:
    """Opens each of several rewards with its own settings, those under its name."""
    names = [part.name for part in config.parts]
    for name, own in config.settings.items():
        if name not in names or not isinstance(own, Mapping):
            raise ConfigError(
                f"the settings of several rewards are a mapping under the name of each ({', '.join(names)}), such as"
                f' {names[0]}={{"setting": 1}}; got {name}={own!r:.80}'
            )
    sources: dict[WeightedPart, RewardSource] = {}
    try:
        for part in config.parts:
            source = await _open_source(config.of_part(part), None)
            assert source is not None
            sources[part] = source
        return WeightedRewards(sources)
    except BaseException:
        for source in sources.values():
            await source.close()
        raise


async def _open_function(config: RewardConfig, function: RewardFunction | None) -> RewardSource:
    name = config.parts[0].function if config.parts else None
    if function is not None and config.source_names:
        raise ConfigError(
            f"an episode has one reward, got a function in Python and the {config.source_names[0]} of the settings"
        )
    if function is not None and config.manner == "pool":
        raise ConfigError("processes of a pool load their function by name: give 'path/to/file.py:name'")
    is_bundled = name is not None and ":" not in name
    pooled = config.manner == "auto" and is_bundled and name is not None and wants_processes(find_reward(name))
    if name is not None and (config.manner == "pool" or pooled):
        job = PoolJob(function=name, settings=config.settings, timeout_s=config.timeout_s, memory_mb=config.memory_mb)
        pool = RewardPool(job, config.num_calls(in_processes=True))
        await pool.open()
        return pool
    reward_function = find_reward(name) if name is not None else function
    assert reward_function is not None
    call = RewardCall.of(reward_function, config.settings, name=name or "", batch=config.manner == "batch")
    return LocalFunction(call, timeout_s=config.timeout_s, num_at_once=config.num_calls())


def _environment_reward(trajectory: Trajectory) -> Reward:
    turns = tuple(turn.reward or 0.0 for turn in trajectory.turns)
    return Reward(trajectory.reward or 0.0, turns=turns)


async def _all_of(scorings: Sequence[Coroutine[object, object, Trajectory]]) -> list[Trajectory]:
    """Returns the results; when one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(scoring) for scoring in scorings]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
