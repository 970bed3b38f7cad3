"""A rank of the learner in its own process, and the learner that the ranks form together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map_only

from agentgym.engines.servers.server_process import free_port
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import on_device
from agentgym.model.policy import load_policy
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.checkpoint import LEARNER, guard_writes
from agentgym.trainers.checkpoints.sharded_state import StateShard, open_state, plans_of_ranks
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.cluster.actors import Actor, ActorLost, own_address, together
from agentgym.trainers.cluster.board import report_warnings
from agentgym.trainers.cluster.node_files import NodeFiles
from agentgym.trainers.cluster.shipment import Shipment
from agentgym.trainers.cluster.weight_store import store_weights, write_weights
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.learner import Learner, StepStats
from agentgym.trainers.learner.lora import adapt
from agentgym.trainers.learner.mismatch import UNBOUNDED, MismatchBound
from agentgym.trainers.parallel.ranks import Ranks
from agentgym.trainers.parallel.sharded_tensor import shard
from agentgym.trainers.parallel.world import Sharded
from agentgym.trainers.parts.parts import LearnerLost
from agentgym.types import JSON

__all__ = ["ClusterLearner", "CopyTarget", "RankActor"]

COLLECTIVE_S = 600.0
"""The seconds that a rank waits for the others."""


@dataclass(frozen=True, eq=False)
class Beginning:
    """The arguments that a rank starts with."""

    config: TrainConfig
    model_folder: str
    """The folder of the weights: the run's model, or the checkpoint that it resumes from."""
    reference_folder: str
    """The folder of the weights that a KL term is computed against."""
    files: NodeFiles
    address: str
    """The rendezvous address of the ranks: `host:port` of rank 0."""


@dataclass(frozen=True, kw_only=True)
class CopyTarget:
    """A folder that ranks write what they copied into."""

    folder: str
    marker: str
    """The name of a file that is in the folder on nodes that have it."""
    config: Mapping[str, JSON]
    """The contents of the model's `config.json`."""


@dataclass(frozen=True, eq=False)
class RankCopy:
    """A rank's part of a checkpoint; on rank 0 with the weights."""

    state: StateShard
    shipment: Shipment | None

    def write(self, target: CopyTarget, files: NodeFiles) -> list[WriteResult]:
        """Writes the files of this rank; raises RunFolderError if they cannot be written."""

        def write_files(folder: Path) -> list[WriteResult]:
            if self.shipment is not None:
                write_weights(self.shipment, target.config, folder)
            return self.state.write(folder / LEARNER)

        with guard_writes(Path(target.folder)):
            return files.write(target.folder, target.marker, write_files)


class RankActor:
    """One of the processes that share a Learner; a single rank is a learner as in one process."""

    def __init__(self, label: str, board: Actor, rank: int, size: int) -> None:
        report_warnings(label, board)
        self._rank, self._size = rank, size
        self._shipment: Shipment | None = None
        """The weights that were shipped last, on rank 0; they are lost with this process."""
        self._shipped_step: int | None = None
        self._memory = CopyMemory()
        self._copies: dict[int, RankCopy] = {}
        self._writes: dict[int, Future[list[WriteResult]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

    def meeting_place(self) -> str:
        """Returns an address of this process's node with a free port."""
        return f"{own_address()}:{free_port(host='')}"

    def begin(self, beginning: Beginning) -> int:
        """Joins the other ranks and makes the learner; returns the process id."""
        config, size = beginning.config, self._size
        self._is_colocated = config.ray.layout == "colocated"
        on_gpu = bool(config.ray.gpus_per_learner)
        if size > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # gloo for what fsdp.cpu_offload keeps in CPU memory
                init_method=f"tcp://{beginning.address}",
                rank=self._rank,
                world_size=size,
                timeout=timedelta(seconds=COLLECTIVE_S),
            )
        device, learner = "cuda" if on_gpu else "cpu", config.learner
        ranks = Ranks(learner.fsdp, device, mesh=learner.mesh) if size > 1 else None

        lora, backend = config.learner.lora, config.model_backend
        self._files = beginning.files

        def load(path: str) -> LanguageModel | Sharded:
            folder = self._files.folder(path)
            if ranks is not None and not lora.rank:
                return ranks.load(folder, backend=backend)
            if ranks is None:
                dtype = getattr(torch, learner.compute_dtype)
                return on_device(load_policy(folder, dtype=dtype, backend=backend), device)
            return ranks.shard(adapt(load_policy(folder, backend=backend), lora))

        # Adapters are put on the weights that the run began with, and are not in the folder that it resumes from.
        self._learner = Learner(
            load(beginning.reference_folder if lora.rank else beginning.model_folder),
            learner,
            config.optimizer,
            total_steps=config.steps,
            temperature=config.sampling.temperature,
            reference=load(beginning.reference_folder) if learner.needs_first_weights and not lora.rank else None,
        )
        return os.getpid()

    def act_on(self, batch: TrainingBatch, method: str, options: Mapping[str, object]) -> Any:
        """Calls a method of the learner with a batch, the same on all ranks; rank 0 returns its result.

        No tensor leaves on a GPU, which the process that reads it may not have.
        """
        found = getattr(self._learner, method)(batch, **options)
        return tree_map_only(Tensor, Tensor.cpu, found) if self._rank == 0 else None

    def read_values(self, batch: TrainingBatch) -> tuple[Tensor, Tensor] | None:
        """Returns the result of the critic's `read` on a batch, from rank 0."""
        assert self._learner.critic is not None
        values, ends = self._learner.critic.read(batch)
        return (values.cpu(), ends.cpu()) if self._rank == 0 else None

    def ship(self) -> Shipment | None:
        """Stores the current weights in the cluster, and returns what is known of them, from rank 0.

        They replace those that were shipped before.
        """
        self._shipment, self._shipped_step = None, self.num_steps()
        weights = self._learner.weights(trained_only=False)
        if self._rank == 0:
            self._shipment = store_weights(weights)
        else:
            for _ in weights:  # each is gathered from all ranks
                pass
        if self._is_colocated:
            torch.cuda.empty_cache()  # an engine on this GPU takes its memory back
        return self._shipment

    def copy_state(self, number: int) -> None:
        """Copies this rank's shards of the learner's state, and keeps the shipped weights of the same step."""
        if self._shipped_step != self.num_steps():
            self.ship()
        state, plans = self._learner.state_dict(shard), {"merge": plans_of_ranks} if self._size > 1 else {}
        copied = StateShard(state, self._rank, memory=self._memory, **plans)
        self._copies[number] = RankCopy(copied, self._shipment)

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

    def load_state(self, folder: str) -> None:
        """Loads the learner's state from a checkpoint, of which this rank reads its shards."""
        self._learner.load_state_dict(open_state(self._files.folder(folder)))
        self._shipped_step = None

    def _check_has(self, number: int) -> None:
        if number not in self._copies:
            raise LearnerLost("a rank was restarted, and what it was to write is lost")

    def num_steps(self) -> int:
        """Returns the number of optimizer steps so far."""
        return self._learner.num_steps


class ClusterLearner:
    """The ranks of a learner with the interface of `Learner`: all of them do each operation.

    This process has no weights.
    """

    def __init__(self, ranks: Sequence[Actor], config: TrainConfig, files: NodeFiles) -> None:
        self._files = files
        self.config = config.learner
        self.temperature = config.sampling.temperature
        self.critic = _DistantCritic(self) if config.learner.critic.exists else None
        self._ranks = tuple(ranks)

    def begin(self, config: TrainConfig, model_folder: Path, reference_folder: Path) -> None:
        """Makes the ranks join each other and load the model."""
        (address,) = together(self._ranks[:1], "meeting_place")
        folders = str(model_folder.absolute()), str(reference_folder.absolute())
        self.ask("begin", Beginning(config, *folders, self._files, address))

    def update(self, batch: TrainingBatch, *, version: int = 0, bound: MismatchBound = UNBOUNDED) -> StepStats:
        """See `Learner.update`."""
        stats: StepStats = self.ask("act_on", batch, "update", {"version": version, "bound": bound})
        return stats

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """See `Learner.update_critic`."""
        if self.critic is None:
            return None
        stats: CriticStats | None = self.ask("act_on", batch, "update_critic", {})
        return stats

    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """See `Learner.logprobs`."""
        return self._tensor("act_on", batch, "logprobs", {"temperature": temperature})

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """See `Learner.penalties`."""
        return self._tensor("act_on", batch, "penalties", {})

    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """See `Learner.gradient_proxies`."""
        return self._tensor("act_on", batch, "gradient_proxies", {})

    @property
    def num_steps(self) -> int:
        """See `Learner.num_steps`."""
        number: int = self.ask("num_steps")
        return number

    def close(self) -> None:
        """Does nothing: the cluster ends its actors."""

    def ask(self, method: str, *arguments: object) -> Any:
        """Calls the same method on all ranks and returns rank 0's result; raises LearnerLost if a rank is gone."""
        return self.ask_all(method, *arguments)[0]

    def ask_all(self, method: str, *arguments: object) -> list[Any]:
        """Calls the same method on all ranks and returns their results; raises LearnerLost if a rank is gone."""
        try:
            return together(self._ranks, method, *arguments)
        except ActorLost as error:
            raise LearnerLost(f"{error}; the other ranks cannot go on without it") from error

    def _tensor(self, method: str, *arguments: object) -> Tensor:
        found: Tensor = self.ask(method, *arguments)
        return found


class _DistantCritic:
    """The critic of the ranks."""

    def __init__(self, learner: ClusterLearner) -> None:
        self._learner = learner
        self.config = learner.config.critic

    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """See `Critic.read`."""
        found: tuple[Tensor, Tensor] = self._learner.ask("read_values", batch)
        return found
