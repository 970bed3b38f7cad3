"""A rank of a group that shares a model: it joins the others, loads its part, and copies its part of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from agentgym.engines.servers.server_process import free_port
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import on_device
from agentgym.model.policy import load_policy
from agentgym.trainers.checkpoints.checkpoint import guard_writes
from agentgym.trainers.checkpoints.sharded_state import StateShard, open_state, plans_of_ranks
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.cluster.actors import Actor, own_address
from agentgym.trainers.cluster.board import Board, report_warnings
from agentgym.trainers.cluster.node_files import NodeFiles
from agentgym.trainers.cluster.shipment import Shipment
from agentgym.trainers.cluster.weight_store import write_weights
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.lora import adapt
from agentgym.trainers.parallel.learner_ranks import Sharded
from agentgym.trainers.parallel.ranks import Ranks, open_group
from agentgym.trainers.parallel.sharded_tensor import Gather, shard
from agentgym.trainers.parts.parts import LearnerLost
from agentgym.trainers.settings.cluster import ModelRole
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.types import JSON

__all__ = ["CopyTarget", "RankProcess", "RankSetup", "SavingRank"]


@dataclass(frozen=True, eq=False)
class RankSetup:
    """The arguments of `RankProcess.begin`."""

    config: TrainConfig
    model_folder: str
    """The folder of the weights: the run's model, or the checkpoint that it resumes from."""
    reference_folder: str
    """The folder of the weights that the run started from, before any update."""
    vocab_size: int
    """The number of token ids of the model."""
    files: NodeFiles
    address: str = ""
    """The rendezvous address of the ranks: `host:port` of rank 0."""


@dataclass(frozen=True, kw_only=True)
class CopyTarget:
    """A folder that ranks write what they copied into."""

    folder: str
    """The folder of the checkpoint."""
    part: str
    """The subfolder of the group's state."""
    marker: str
    """The name of a file that is in the folder on nodes that have it."""
    config: Mapping[str, JSON]
    """The contents of the model's `config.json`."""


@dataclass(frozen=True, eq=False)
class RankCopy:
    """A rank's part of a checkpoint; on rank 0 of the learner with the weights."""

    state: StateShard
    shipment: Shipment | None

    def write(self, target: CopyTarget, files: NodeFiles) -> list[WriteResult]:
        """Writes the files of this rank; raises RunFolderError if they cannot be written."""

        def write_files(folder: Path) -> list[WriteResult]:
            if self.shipment is not None:
                write_weights(self.shipment, target.config, folder)
            return self.state.write(folder / target.part)

        with guard_writes(Path(target.folder)):
            return files.write(target.folder, target.marker, write_files)


class RankProcess(ABC):
    """One of the ranks that share a model; a single rank computes without a process group, as a run in one process."""

    role: ModelRole

    def __init__(self, label: str, board: Actor[Board], rank: int, size: int) -> None:
        report_warnings(label, board)
        self._rank, self._size = rank, size

    @abstractmethod
    def begin(self, setup: RankSetup) -> int:
        """Joins the other ranks and makes what the rank computes with; returns the process id."""

    def rendezvous_address(self) -> str:
        """Returns an address of this process's node with a free port."""
        return f"{own_address()}:{free_port(host='')}"

    def _join(self, setup: RankSetup) -> LearnerConfig:
        """Joins the other ranks, and returns the settings to compute with; `mesh` and `shares` are the learner's."""
        config = setup.config
        self._files, self._config = setup.files, config.learner
        if self.role != "learner":
            self._config = replace(config.learner, mesh=MeshConfig(), shares=None)
        on_gpu = bool(config.ray.needs(self.role).get("GPU"))
        self._device = "cuda" if on_gpu else "cpu"
        self._ranks: Ranks | None = None
        if self._size > 1:
            place = {"init_method": f"tcp://{setup.address}", "rank": self._rank, "world_size": self._size}
            open_group(on_gpu=on_gpu, **place)
            self._ranks = Ranks(self._config, self._device)
        return self._config

    def _load(
        self, path: str, backend: str, lora: LoraConfig | None = None, *, is_of_run: bool = True
    ) -> LanguageModel | Sharded:
        """Loads a folder's model, sharded over the ranks if there are several, with adapters if they are wanted.

        A folder that is not of the run is on the node of this process.
        """
        folder = self._files.folder(path) if is_of_run else Path(path)
        ranks, dtype = self._ranks, getattr(torch, self._config.compute_dtype)
        prepare = None if lora is None else partial(adapt, config=lora)
        if ranks is None:
            model = on_device(load_policy(folder, dtype=dtype, backend=backend), self._device)
            return model if prepare is None else prepare(model)
        if self.role != "reference":
            dtype = torch.float32  # of the weights that the optimizer steps on
        return ranks.load(folder, dtype, backend=backend, prepare=prepare)


class SavingRank(RankProcess):
    """A rank with a state that is trained: it copies its shards, writes them while training goes on, and loads them."""

    def __init__(self, label: str, board: Actor[Board], rank: int, size: int) -> None:
        super().__init__(label, board, rank, size)
        self._memory = CopyMemory()
        self._copies: dict[int, RankCopy] = {}
        self._writes: dict[int, Future[list[WriteResult]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

    @abstractmethod
    def num_steps(self) -> int:
        """Returns the number of optimizer steps so far."""

    @abstractmethod
    def _state(self, gather: Gather) -> Mapping[str, Any]:
        """Returns this rank's part of the state."""

    @abstractmethod
    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a checkpoint, of which this rank reads its shards."""

    def copy_state(self, number: int) -> None:
        """Copies this rank's shards of the state."""
        self._copies[number] = RankCopy(self._copied_state(), None)

    def _copied_state(self) -> StateShard:
        plans = {"merge": plans_of_ranks} if self._size > 1 else {}
        return StateShard(self._state(shard), self._rank, memory=self._memory, **plans)

    def write_copy(self, number: int, target: CopyTarget) -> None:
        """Begins to write what was copied into a checkpoint's folder, on a thread."""
        self._check_has(number)
        self._writes[number] = self._thread.submit(self._copies[number].write, target, self._files)

    def results_of(self, number: int) -> list[WriteResult] | None:
        """Returns what was written, or None while it is being written; raises RunFolderError if it cannot be."""
        self._check_has(number)
        write = self._writes[number]
        return write.result() if write.done() else None

    def end_copy(self, number: int) -> tuple[Any, Metadata]:
        """Forgets what was copied; returns the structure and the metadata of the state."""
        self._check_has(number)
        self._writes.pop(number, None)
        state = self._copies.pop(number).state
        return state.structure, state.metadata

    def load_state(self, folders: Sequence[str]) -> None:
        """Loads the state from the folders of a checkpoint that have its parts."""
        state: dict[str, Any] = {}
        for folder in folders:
            state |= open_state(self._files.folder(folder))
        self._load_state(state)

    def _check_has(self, number: int) -> None:
        if number not in self._copies:
            raise LearnerLost("a rank was restarted, and what it was to write is lost")
