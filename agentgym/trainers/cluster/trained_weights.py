"""The weights that the ranks of a run train: sent to engines, and written to checkpoints, by the ranks themselves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from agentgym.engines.protocol import WeightSync
from agentgym.trainers.checkpoints.checkpoint import learner_folders
from agentgym.trainers.checkpoints.sharded_state import finish_state
from agentgym.trainers.cluster.cluster_learner import ClusterLearner, RankGroup
from agentgym.trainers.cluster.engine import ClusterEngine
from agentgym.trainers.cluster.rank_actor import RankActor
from agentgym.trainers.cluster.rank_process import CopyTarget, SavingRank
from agentgym.types import JSON

__all__ = ["ClusterWeights"]

POLL_S = 0.2


class ClusterWeights:
    """The weights that the ranks train, sent to the engines through the cluster; without an engine only saved.

    `config` is the contents of the model's `config.json`.
    """

    def __init__(self, engine: ClusterEngine | None, learner: ClusterLearner, config: Mapping[str, JSON]) -> None:
        self._engine, self._learner, self._config = engine, learner, config
        self._numbers = count()

    async def send(self, version: int) -> WeightSync:
        """Has the ranks store the weights in the cluster, and the engines take them there."""
        assert self._engine is not None, "a lesson that plays nothing sends no weights"
        shipment = await asyncio.to_thread(self._learner.ranks.ask, RankActor.ship, self._engine.dtype)
        assert shipment is not None, "it is of rank 0"
        return await self._engine.take_shipment(shipment, version)

    def copy(self) -> _DistantContent:
        """Has each rank copy its shards of what it trains; of the model the shipped weights are kept."""
        number = next(self._numbers)
        for group in self._learner.saved_groups:
            group.ask(SavingRank.copy_state, number)
        return _DistantContent(self._learner.saved_groups, self._config, number)

    def load(self, checkpoint: Path) -> None:
        """Has each rank read its shards of a checkpoint's state, whichever groups have written it."""
        folders, groups = learner_folders(checkpoint), self._learner.saved_groups
        for group in groups:
            own = [folder for folder in folders if folder.name == group.part]
            sources = own if own and len(groups) > 1 else folders
            group.ask(SavingRank.load_state, [str(folder.absolute()) for folder in sources])


@dataclass(frozen=True, eq=False)
class _DistantContent:
    """The copies of the state of a step that the ranks have made."""

    groups: Sequence[RankGroup[SavingRank]]
    config: Mapping[str, JSON]
    number: int
    is_live: bool = False

    def write(self, folder: Path) -> None:
        """Has the ranks write their files while they train on, and waits until they have."""
        marker = folder / f".{secrets.token_hex(8)}"
        marker.touch()
        for group in self.groups:
            target = CopyTarget(folder=str(folder.absolute()), part=group.part, marker=marker.name, config=self.config)
            try:
                results = self._write(group, target)
            finally:
                state_layout = group.ask(SavingRank.end_copy, self.number)
            finish_state(folder / group.part, *state_layout, results)
        marker.unlink()

    def _write(self, group: RankGroup[SavingRank], target: CopyTarget) -> list[list[WriteResult]]:
        group.ask(SavingRank.write_copy, self.number, target)
        while True:
            time.sleep(POLL_S)
            results = group.ask_all(SavingRank.results_of, self.number)
            finished = [result for result in results if result is not None]
            if len(finished) == len(results):
                return finished
