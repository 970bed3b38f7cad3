"""Starts the actors of a run, and reports the node of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

from agentgym.trainers.cluster.actors import Actor, ActorLost, Cluster
from agentgym.trainers.cluster.board import Board, BoardKeeper
from agentgym.trainers.cluster.cluster_learner import ClusterLearner
from agentgym.trainers.cluster.engine import ClusterEngine, Engines
from agentgym.trainers.cluster.engine_actor import EngineActor, EngineFacts
from agentgym.trainers.cluster.episodes import Cast, ClusterStage, EpisodeActor
from agentgym.trainers.cluster.inner_engine import Part
from agentgym.trainers.cluster.node_files import ONE_NODE, FileServer, NodeFiles
from agentgym.trainers.cluster.rank_actor import CriticActor, RankActor, ReferenceActor
from agentgym.trainers.cluster.rank_process import RankProcess, RankSetup
from agentgym.trainers.cluster.trained_weights import ClusterWeights
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.parallel.mesh import check_mesh
from agentgym.trainers.parts.engine import IdleEngine
from agentgym.trainers.parts.parts import Origin, RunParts
from agentgym.trainers.parts.stage import LocalStage
from agentgym.trainers.settings.cluster import ROLES

__all__ = ["open_cluster"]

K = TypeVar("K", bound=RankProcess)
LAST_WORDS_S = 5.0
FILE_READERS = 8
"""The processes that the node of the command reads and writes files for at once."""


async def open_cluster(
    config: TrainConfig, origin: Origin, stack: AsyncExitStack, show: Callable[[str], None]
) -> RunParts:
    """Starts the actors of a run; the stack ends them. `show` is called with lines that a user should see."""
    check_mesh(config.learner.mesh, origin.model, config.ray.learners)
    cluster = stack.enter_context(Cluster(config.cluster))
    for line in resource_plan(config, cluster.nodes(), cluster.cores):
        show(line)
    board = cluster.post("the board", Board)
    keeper = BoardKeeper(board)
    stack.push_async_callback(_end_relay, asyncio.ensure_future(keeper.relay()), keeper)
    files = _open_files(origin, cluster)
    launch = _Launch(config, origin, cluster, board, files)
    learner = ClusterLearner(config, launch.ranks(RankActor), launch.ranks(ReferenceActor), launch.ranks(CriticActor))
    actors = launch.engines()
    engines = await _gather_engines(actors, config) if actors else None
    workers = launch.workers(engines) if engines else []
    learner_start = asyncio.to_thread(learner.begin, launch.rank_setup())
    await asyncio.gather(
        learner_start,
        *(worker.call(EpisodeActor.ready) for worker in workers),
        *(actor.call(EngineActor.prepare) for actor in actors),
    )
    if engines is None:
        idle = IdleEngine(origin.model)
        weights = ClusterWeights(None, learner, origin.model.to_hf())
        return RunParts(idle, LocalStage(config, idle, origin.renderer), learner, weights)
    engine = ClusterEngine(engines, keeper, version=origin.version)
    stage = ClusterStage(config, workers)
    stack.push_async_callback(engine.close)
    stack.push_async_callback(stage.close)
    return RunParts(engine, stage, learner, ClusterWeights(engine, learner, origin.model.to_hf()))


def _open_files(origin: Origin, cluster: Cluster) -> NodeFiles:
    """Returns the run's folders for its actors; another node has them from an actor on this one."""
    if not cluster.has_other_nodes:
        return ONE_NODE
    folders = {origin.model_folder, origin.weights_folder, origin.run_folder}
    roots = [str(folder.absolute()) for folder in folders]
    return NodeFiles(
        cluster.run, cluster.post("the files", FileServer, roots, is_here=True, max_concurrency=FILE_READERS)
    )


@dataclass(frozen=True, eq=False)
class _Launch:
    """The start of a run's actors, each on its bundle."""

    config: TrainConfig
    origin: Origin
    cluster: Cluster
    board: Actor[Board]
    files: NodeFiles

    def ranks(self, kind: type[K]) -> list[Actor[K]]:
        number = self.cluster.config.count(kind.role)
        return [
            self.cluster.actor(kind.role, rank, kind, self.board, rank, number, max_concurrency=1)
            for rank in range(number)
        ]

    def rank_setup(self) -> RankSetup:
        origin = self.origin
        folders = str(origin.weights_folder.absolute()), str(origin.model_folder.absolute())
        return RankSetup(self.config, *folders, origin.model.vocab_size, self.files)

    def engines(self) -> list[Actor[EngineActor]]:
        actors, origin, ray = [], self.origin, self.cluster.config
        is_model = self.config.engine == "local"  # a server starts as everywhere, with the run's first weights
        folder = str((origin.weights_folder if is_model else origin.model_folder).absolute())
        logs, version = str(origin.logs.absolute()), origin.version
        for number in range(ray.engines):
            part = Part(config=self.config, number=number, folder=folder, logs=logs, version=version, files=self.files)
            limit = self.config.sampler.concurrency + 64
            actors.append(self.cluster.actor("engine", number, EngineActor, part, self.board, max_concurrency=limit))
        return actors

    def workers(self, engines: Engines) -> list[Actor[EpisodeActor]]:
        ray, actors = self.cluster.config, []
        part = Cast(self.config, str(self.origin.model_folder.absolute()), engines, self.board, self.files)
        for number in range(ray.workers):
            limit = self.config.sampler.concurrency + 16
            actors.append(self.cluster.actor("worker", number, EpisodeActor, part, max_concurrency=limit))
        return actors


async def _gather_engines(actors: Sequence[Actor[EngineActor]], config: TrainConfig) -> Engines:
    """Waits until all engines have started, and returns them."""
    facts = await asyncio.gather(*(actor.call(EngineActor.identity) for actor in actors))
    common = EngineFacts(
        vocab_size=min(fact.vocab_size for fact in facts),
        context_window=min(fact.context_window for fact in facts),
        dtype=facts[0].dtype,
    )
    start_s = config.ray.start_s + (config.server.ready_s if config.on_servers else 0)
    return Engines(tuple(actors), common, patience_s=start_s)


async def _end_relay(relay: asyncio.Task[None], keeper: BoardKeeper) -> None:
    """Ends the relay, and logs the actors' last warnings."""
    relay.cancel()
    await asyncio.wait({relay})
    with suppress(ActorLost, TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            await keeper.tell_news()


def resource_plan(config: TrainConfig, nodes: list[str], cores: int | None = None) -> list[str]:
    """Returns a line per role with the nodes of its actors; `cores` are those of a cluster on this machine alone."""
    cluster, lines = config.cluster, []
    for role in ROLES:
        if not (number := cluster.count(role)):
            continue
        amounts = cluster.needs(role).items()
        needs = ", ".join(f"{amount:g} {name}" for name, amount in amounts) or "nothing reserved"
        stand = Counter(nodes[cluster.place(role, index)] for index in range(number))
        where = ", ".join(node if many == number else f"{node} {many}" for node, many in stand.items())
        lines.append(f"{number} {role}{'s' if number > 1 else ''} ({needs} each) on {where}")
    if cluster.layout == "colocated":
        lines.append("colocated: an engine releases its memory while the rank next to it learns")
    if cores is not None:
        lines.append(f"all on this machine, which has {cores} core{'s' if cores > 1 else ''} for them")
    return lines
