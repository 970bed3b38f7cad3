"""Begins the actors of a run, and tells where each is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from agentgym.trainers.cluster.actors import Actor, Cluster
from agentgym.trainers.cluster.board import Board, relay_warnings
from agentgym.trainers.cluster.engine_actor import ClusterEngine, EngineActor
from agentgym.trainers.cluster.episodes import Cast, ClusterStage, EpisodeActor
from agentgym.trainers.cluster.rank_actor import ClusterLearner, RankActor
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.parts import Origin, RunParts

__all__ = ["open_cluster"]


async def open_cluster(
    config: TrainConfig, origin: Origin, stack: AsyncExitStack, tell: Callable[[str], None]
) -> RunParts:
    """Begins the actors of a run; the stack ends them. `tell` is given lines that a user should see."""
    config.learner.mesh.check(origin.model.config, config.ray.learners)
    cluster = stack.enter_context(Cluster(config.ray))
    for line in resource_plan(config, cluster.nodes()):
        tell(line)
    board = cluster.post("board", Board)
    relay = asyncio.ensure_future(relay_warnings(board))
    stack.push_async_callback(_ended, relay)
    begun = _Beginning(config, origin, cluster, board)
    ranks, engines = begun.ranks(), begun.engines()
    sizes = await asyncio.gather(*(one.call("identity") for one in engines))
    size = sizes[0][:2]
    workers = begun.workers(engines, size)
    learner = ClusterLearner(ranks, config, origin.model)
    meeting = asyncio.to_thread(learner.begin, config, origin.weights_folder, origin.model_folder)
    await asyncio.gather(meeting, *(one.call("ready") for one in workers), *(one.call("prepare") for one in engines))
    engine = ClusterEngine(engines, board, size=size, version=origin.version)
    stage = ClusterStage(config, workers)
    stack.push_async_callback(engine.close)
    stack.push_async_callback(stage.close)
    return RunParts(engine, stage, learner)


@dataclass(frozen=True, eq=False)
class _Beginning:
    """Begins the actors, each on its bundle."""

    config: TrainConfig
    origin: Origin
    cluster: Cluster
    board: Actor

    def ranks(self) -> list[Actor]:
        number = self.config.ray.learners
        labels = [f"learner {rank}" for rank in range(number)]
        return [
            self.cluster.actor(place, label, RankActor, label, self.board, place, number, max_concurrency=1)
            for place, label in enumerate(labels)
        ]

    def engines(self) -> list[Actor]:
        made, folder = [], str(self.origin.weights_folder.absolute())
        for number in range(self.config.ray.engines):
            label, place = f"engine {number}", self.config.ray.learners + number
            arguments = (label, folder, self.config.hf, self.origin.version, self.board)
            made.append(self.cluster.actor(place, label, EngineActor, *arguments))
        return made

    def workers(self, engines: Sequence[Actor], size: tuple[int, int]) -> list[Actor]:
        ray, made = self.config.ray, []
        part = Cast(self.config, str(self.origin.model_folder.absolute()), tuple(engines), self.board, size)
        for number in range(ray.workers):
            label, place = f"worker {number}", ray.learners + ray.engines + number
            most = self.config.sampler.concurrency + 16
            made.append(self.cluster.actor(place, label, EpisodeActor, label, part, max_concurrency=most))
        return made


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def resource_plan(config: TrainConfig, nodes: list[str]) -> list[str]:
    """Which actors stand on which node, a line each kind."""
    cluster, lines, start = config.ray, [], 0
    for kind, number in (("learner", cluster.learners), ("engine", cluster.engines), ("worker", cluster.workers)):
        bundle = cluster.bundles[start]
        needs = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing reserved"
        where = ", ".join(nodes[start : start + number])
        lines.append(f"{number} {kind}{'s' if number > 1 else ''} ({needs} each) on {where}")
        start += number
    return lines
