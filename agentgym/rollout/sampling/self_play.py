"""Self-play: the seats of one game are separate episodes, which meet at a table around one environment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from agentgym.envs.base.multi_agent import MultiAgentEnv
from agentgym.envs.base.opponents import SELF
from agentgym.errors import ConfigError, EngineError, EnvironmentFault
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import EpisodeLoop, GameAbandoned, failed_ending, replay_info
from agentgym.rollout.hosting.answer import EnvStep, read_reset, read_step
from agentgym.rollout.hosting.env_code import ENV_CODE, EnvCallTimeout, attempt
from agentgym.rollout.hosting.env_host import LocalEnv, make_task_env
from agentgym.rollout.hosting.hosted_env import Env, HostedEnv, facts_of
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.trajectory import Status, StopReason, Trajectory
from agentgym.types import Task

__all__ = ["SelfPlaySampler", "group_of", "seats_of"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

TableName: TypeAlias = tuple[str, int, int, str]


def seats_of(env: object) -> tuple[str, ...]:
    """Returns the seats that a rollout plays in an environment; () if it plays one agent, as everywhere else.

    Raises ConfigError for a game in wrappers, which see the replies of one agent.
    """
    game: Any = getattr(env, "unwrapped", env)
    is_seated = isinstance(game, MultiAgentEnv) and game.opponent == SELF
    if is_seated and game is not env:
        raise ConfigError(f"self-play would leave out the wrappers of {env}: name the game without them")
    return game.agents if is_seated else ()


def group_of(game: str, agent: str) -> str:
    """Returns the name of a seat's group, in which trajectories of the same seat and the same task are compared.

    >>> group_of("3/0", "X")
    '3/0:X'
    """
    return f"{game}:{agent}"


class SelfPlayGame:
    """One game: each episode at the table waits until it is its turn, and leaves when it is over."""

    def __init__(self, name: TableName, env_id: str, hosted: LocalEnv, env: MultiAgentEnv) -> None:
        self.name = name
        self.env_id = env_id
        self.hosted = hosted
        self.game = env
        self.num_seated = len(env.agents)
        self._has_begun = self._is_truncated = False
        self._error: GameAbandoned | EngineError | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def begin(self, agent: str, seed: int, options: dict[str, object] | None) -> tuple[object, ...]:
        """Starts the game if it has not started; returns what the agent sees at its first turn."""
        if not self._has_begun:
            self._has_begun = True
            with ENV_CODE:
                self.game.reset(seed=seed, options=options)
            self._wake()
        await self._turn_of(agent)
        if self._is_over:
            raise GameAbandoned(f"the game was over before the first turn of {agent}")
        with ENV_CODE:
            observation, _, _, _, info = self.game.step_result(agent, "")
        return observation, {"messages": info["messages"]}

    async def move(self, agent: str, action: str) -> tuple[object, ...]:
        """Plays a reply; returns what the agent sees when it is its turn again, or when the game is over."""
        with ENV_CODE:
            *_, truncated, _ = self.game.step(action)
        reply, results = self.game.answered
        self._is_truncated = self._is_truncated or truncated
        self._wake()
        await self._turn_of(agent)
        with ENV_CODE:
            observation, reward, over, _, info = self.game.step_result(agent, reply, results)
        return observation, reward, over, self._is_truncated and not over, info

    def leave(self, agent: str, trajectory: Trajectory, *, is_rival: bool = False) -> None:
        """Ends an episode at the table.

        If the game is not over, the others win by forfeit. If the episode failed, the others' game ends too.
        """
        self.num_seated -= 1
        if self._is_over or self._error is not None:
            return
        if trajectory.status is Status.TRUNCATED:
            error, _ = attempt(lambda: self.game.forfeit(agent))
            if error is not None:
                self._error = GameAbandoned(f"the game raised when {agent} forfeited it: {error}")
        else:
            line = f"{agent} ended as {trajectory.status}: {trajectory.error}"
            self._error = EngineError(f"the rival {line}") if is_rival else GameAbandoned(f"the game ended when {line}")
        self._wake()

    @property
    def _is_over(self) -> bool:
        return self.game.over or self._is_truncated

    def _may_go(self, agent: str) -> bool:
        return self._error is not None or self._is_over or self.game.agent_selection == agent

    async def _turn_of(self, agent: str) -> None:
        """Waits for the agent's turn or the game's end; raises if the game cannot continue."""
        while not self._may_go(agent):
            waiting = self._waiting[agent] = asyncio.get_running_loop().create_future()
            await waiting
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        for agent in [agent for agent in self._waiting if self._may_go(agent)]:
            waiting = self._waiting.pop(agent)
            if not waiting.done():
                waiting.set_result(None)


class SeatEnv(HostedEnv):
    """An environment as one of its agents sees it: `reset` and `step` return when it is that agent's turn."""

    __slots__ = ("_agent", "_table")

    def __init__(self, table: SelfPlayGame, agent: str) -> None:
        super().__init__()
        self._table = table
        self._agent = agent

    async def reset(self, seed: int, options: dict[str, object] | None) -> EnvStep:
        """Returns what the agent sees at its first turn."""
        values = await self._table.begin(self._agent, seed, options)
        self.facts = facts_of(self._table.game)
        return read_reset(values)

    async def step(self, action: str) -> EnvStep:
        """Plays the agent's move; returns what it sees at its next turn."""
        return read_step(await self._table.move(self._agent, action))

    async def apply(self, function: Callable[[Env], Coroutine[object, object, T]]) -> T:
        """Runs a function that looks into the game, which others may still play."""
        return await self._table.hosted.apply(function)

    async def close(self) -> None:
        """Does nothing: the table closes the environment."""


class SelfPlaySampler(Sampler):
    """A `Sampler` whose episodes name the seat that they play (`Episode.seat`); those of one game meet at a table.

    The episodes of a game are adjacent in the list, and at least as many run at once as a game has seats. With a
    `rival`, each game has one such episode, and the rival plays the other seats: nothing of it is recorded or trained.
    """

    def __init__(
        self,
        loop: EpisodeLoop,
        make: Callable[[Task], Env] = make_task_env,
        config: SamplerConfig | None = None,
        rival: EpisodeLoop | None = None,
    ) -> None:
        super().__init__(loop, make, config)
        if self.config.env_processes:
            raise ConfigError(
                "the seats of a game share its environment, which is in this process: leave env_processes out"
            )
        self.rival = rival
        self._tables: dict[TableName, asyncio.Future[SelfPlayGame]] = {}
        self._tasks: dict[SelfPlayGame, list[asyncio.Task[None]]] = {}

    async def play(self, episode: Episode) -> Trajectory:
        """Plays one seat of a game; the last seat to leave closes the environment."""
        try:
            table = await self._find_table(episode)
        except (EnvironmentFault, EnvCallTimeout) as error:
            return EpisodeBuilder(episode).finish(failed_ending(error, episode))
        except GameAbandoned as error:
            ending = EpisodeEnd(Status.CANCELLED, StopReason.CANCELLED, str(error), replay_info(episode))
            return EpisodeBuilder(episode).finish(ending)
        try:
            return await self._play_at(table, episode, self.loop)
        finally:
            await self._end(table)

    async def _find_table(self, episode: Episode) -> SelfPlayGame:
        """Returns the table of the episode's game, which the first episode sets up."""
        game = episode.group.removesuffix(group_of("", episode.seat))
        name = (game, episode.member, episode.step, episode.phase)
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = asyncio.get_running_loop().create_future()
            table.add_done_callback(lambda done: done.exception())  # asyncio would complain if no task waits for it
            try:
                table.set_result(await self._set_up(name, episode))
            except BaseException as error:
                table.set_exception(GameAbandoned(f"there is no game: {str(error) or 'it was given up'}"))
                raise
        return await asyncio.shield(table)

    async def _set_up(self, name: TableName, episode: Episode) -> SelfPlayGame:
        hosted = await self.env_host.open(self._make, episode.task)
        assert isinstance(hosted, LocalEnv)
        game = hosted.env.unwrapped
        if not isinstance(game, MultiAgentEnv) or episode.seat not in seats_of(game):
            raise ConfigError(f"{episode.task.env_id} has no seat {episode.seat!r} that a rollout plays")
        if hosted.kind != "inline":
            raise ConfigError(
                f"{type(game).__name__} has runs_inline = False, and the seats of a game in self-play move on the event"
                " loop: its moves have to be short pure computation"
            )
        table = SelfPlayGame(name, episode.task.env_id, hosted, game)
        if self.rival is not None:
            others = [agent for agent in game.agents if agent != episode.seat]
            self._tasks[table] = [asyncio.ensure_future(self._play_rival(table, episode, agent)) for agent in others]
        return table

    async def _play_at(self, table: SelfPlayGame, episode: Episode, loop: EpisodeLoop) -> Trajectory:
        trajectory = cancelled = EpisodeBuilder(episode).finish(
            EpisodeEnd(Status.CANCELLED, StopReason.CANCELLED, "given up")
        )
        try:
            trajectory = await loop.play(SeatEnv(table, episode.seat), episode)
        finally:
            table.leave(episode.seat, trajectory, is_rival=loop is self.rival and trajectory is not cancelled)
        return trajectory

    async def _play_rival(self, table: SelfPlayGame, episode: Episode, seat: str) -> None:
        game = episode.group.removesuffix(group_of("", episode.seat))
        own = replace(episode, seat=seat, group=group_of(game, seat), phase="rival")
        assert self.rival is not None
        await self._play_at(table, own, self.rival)

    async def _end(self, table: SelfPlayGame) -> None:
        """Waits for the rivals, and closes the environment when all have left."""
        rivals = self._tasks.pop(table, [])
        if rivals:
            await asyncio.gather(*rivals)
        if table.num_seated:
            return
        del self._tables[table.name]
        if table.game.tool_specs:
            self._tool_envs.add(table.env_id)
        problem = await table.hosted.close()
        if problem is not None:
            logger.warning("environment %s did not close: %s", type(table.game).__name__, problem)
