"""Episodes that are played in worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from agentgym.chat_templates import open_renderer
from agentgym.chat_templates.protocol import Renderer
from agentgym.errors import AgentGymError, EngineError
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import SURPLUS, EpisodeLoop
from agentgym.rollout.hosting.env_host import EnvHost
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.sampling.sampler import Sampler, cancelled_trajectory
from agentgym.trainers.cluster.actors import Actor, ActorLost
from agentgym.trainers.cluster.board import Board, report_warnings
from agentgym.trainers.cluster.engine import ClusterEngine, Engines
from agentgym.trainers.cluster.node_files import ONE_NODE, NodeFiles
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.parts.stage import Part, limits_for, loop_for
from agentgym.trajectory import Status, StopReason, Trajectory

__all__ = ["ClusterStage", "EpisodeActor"]

_log = logging.getLogger(__name__)
RETRY_S = 0.5
_ELSEWHERE = cast(HostedEnv, None)
"""A placeholder for the environment of an episode that is played in another process."""


@dataclass(frozen=True, eq=False)
class Cast:
    """The inputs that a worker needs to play."""

    config: TrainConfig
    model_folder: str
    engines: Engines
    board: Actor[Board]
    files: NodeFiles = ONE_NODE


class EpisodeActor:
    """A worker: environments, chat format and rollout loop. It keeps no state between episodes."""

    def __init__(self, label: str, cast: Cast) -> None:
        report_warnings(label, cast.board)
        self._cast = cast
        self._renderer: Renderer | None = None
        self._engine: ClusterEngine | None = None
        self._samplers: dict[Part, Sampler] = {}

    async def ready(self) -> bool:
        """Returns once the worker can play."""
        folder = await asyncio.to_thread(self._cast.files.folder, self._cast.model_folder, has_weights=False)
        config = self._cast.config
        variables = config.chat_template_kwargs
        self._renderer = open_renderer(folder, config.family, date=config.date, variables=variables)
        self._engine = ClusterEngine(self._cast.engines)
        self._sampler("train")
        return True

    async def play(self, episode: Episode, part: Part) -> Trajectory:
        """Plays one episode; its failures are statuses, as in `Sampler.play`."""
        if self._engine is None:  # it was restarted
            await self.ready()
        sampler = self._sampler(part)
        assert self._engine is not None
        self._engine.look_for_dead()
        return await sampler.play(episode)

    def _sampler(self, part: Part) -> Sampler:
        if part not in self._samplers:
            config = self._cast.config
            assert self._engine is not None and self._renderer is not None
            loop = loop_for(part, config, self._engine, self._renderer)
            env_host = next((sampler.env_host for sampler in self._samplers.values()), None)
            self._samplers[part] = Sampler(loop, config=config.sampler, env_host=env_host)
        return self._samplers[part]


class ClusterStage:
    """A `Stage` that sends each episode to the worker that plays the fewest.

    If a worker dies, another one plays its episodes again from their seeds, with the same result.
    """

    def __init__(self, config: TrainConfig, workers: Sequence[Actor[EpisodeActor]]) -> None:
        self._config = config
        self._load = dict.fromkeys(workers, 0)
        """The number of episodes that each worker plays now."""
        self._recovering: dict[Actor[EpisodeActor], asyncio.Task[None]] = {}

    def loop(self, part: Part) -> EpisodeLoop:
        """Returns the loop that plays each episode in an actor."""
        return _DistantLoop(self, part, self._config)

    def sampler(self, loop: EpisodeLoop, env_host: EnvHost | None = None) -> Sampler:
        """Returns a sampler that plays many episodes in the actors."""
        return _DistantSampler(loop, config=self._config.sampler)

    async def play(self, episode: Episode, part: Part) -> Trajectory:
        """Plays one episode on a worker; raises ActorLost if no worker is left."""
        while True:
            worker = await self._choose()
            self._load[worker] += 1
            try:
                return await worker.call(EpisodeActor.play, episode, part)
            except ActorLost as error:
                self._leave(worker, error)
            finally:
                self._load[worker] -= 1

    async def close(self) -> None:
        """Stops waiting for dead workers."""
        for task in self._recovering.values():
            task.cancel()

    async def _choose(self) -> Actor[EpisodeActor]:
        """Returns the worker that plays the fewest episodes; if all are dead, waits while one may come back."""
        while not (able := [worker for worker in self._load if worker not in self._recovering]):
            waits = [task for task in self._recovering.values() if not task.done()]
            if not waits:
                raise ActorLost(f"all {len(self._load)} workers died more than ray.max_restarts times")
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return min(able, key=self._load.__getitem__)

    def _leave(self, worker: Actor[EpisodeActor], error: ActorLost) -> None:
        if worker not in self._recovering:
            _log.warning("%s; its %d episodes are played again by others", error, self._load[worker])
            self._recovering[worker] = asyncio.ensure_future(self._recover(worker))

    async def _recover(self, worker: Actor[EpisodeActor]) -> None:
        """Takes a worker back after its restart; gives up after `ray.start_s` seconds."""
        ends = asyncio.get_running_loop().time() + self._config.ray.start_s
        while asyncio.get_running_loop().time() < ends:
            try:
                await worker.call(EpisodeActor.ready)
            except ActorLost:
                await asyncio.sleep(RETRY_S)
                continue
            except AgentGymError as error:
                _log.warning("%s cannot be restarted: %s", worker.label, error)
                return
            del self._recovering[worker]
            _log.warning("%s is back", worker.label)
            return


class _DistantLoop(EpisodeLoop):
    """An episode loop that delegates to the workers' loops."""

    has_environment = False

    def __init__(self, stage: ClusterStage, part: Part, config: TrainConfig) -> None:
        super().__init__(limits_for(part, config))
        self._stage = stage
        self._part: Part = part

    async def play(self, env: HostedEnv, episode: Episode) -> Trajectory:
        """Plays one episode in a worker's environment; `env` is ignored."""
        try:
            return await self._stage.play(episode, self._part)
        except ActorLost as error:
            return EpisodeBuilder(episode).finish(EpisodeEnd(Status.ENGINE_ERROR, StopReason.ENGINE_ERROR, str(error)))
        except asyncio.CancelledError as error:
            if SURPLUS not in error.args:
                raise
            return cancelled_trajectory(episode)

    async def close(self) -> None:
        """Does nothing: the cluster ends its workers."""

    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        raise EngineError("a distant loop plays whole episodes")

    async def _end_session(self, session: str) -> None:
        raise EngineError("a distant loop has no sessions")


class _DistantSampler(Sampler):
    """A sampler that opens no environment of its own."""

    async def play(self, episode: Episode) -> Trajectory:
        """Plays one episode in a worker, which makes its environment and closes it."""
        trajectory = await self.loop.play(_ELSEWHERE, episode)
        if any(row.tools for row in trajectory.rows):
            self._tool_envs.add(episode.task.env_id)
        return trajectory
