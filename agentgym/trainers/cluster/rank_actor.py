"""The processes of a cluster that have a model and its optimizer, or a model alone: learner, reference and critic."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from agentgym.engines.weights.buckets import cast_tensor
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_name import model_folder
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.cluster.actors import Actor
from agentgym.trainers.cluster.board import Board
from agentgym.trainers.cluster.rank_process import RankCopy, RankProcess, RankSetup, SavingRank
from agentgym.trainers.cluster.shipment import Shipment
from agentgym.trainers.cluster.weight_store import store_weights
from agentgym.trainers.learner.critic import Critic, CriticStats
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.parameter_groups import ready_to_train
from agentgym.trainers.learner.reference import ReferenceModel
from agentgym.trainers.parallel.learner_ranks import Sharded, learner_ranks, model_of
from agentgym.trainers.parallel.sharded_tensor import Gather
from agentgym.trainers.settings.critic import CriticConfig

__all__ = ["CriticActor", "RankActor", "ReferenceActor"]

R = TypeVar("R")


class RankActor(SavingRank):
    """One of the processes that share a Learner; a single rank is a learner as in one process."""

    role = "learner"

    def __init__(self, label: str, board: Actor[Board], rank: int, size: int) -> None:
        super().__init__(label, board, rank, size)
        self._shipment: Shipment | None = None
        """The weights that were shipped last, on rank 0; they are lost with this process."""
        self._shipment_key: tuple[int, str | None] | None = None
        """Their step, and the type that they were cast to."""

    def begin(self, setup: RankSetup) -> int:
        """Joins the other ranks and makes the learner; returns the process id."""
        config, learner = setup.config, self._join(setup)
        self._is_colocated = config.ray.layout == "colocated"
        lora = learner.lora if learner.lora.rank else None
        # Adapters are put on the weights that the run began with, and are not in the folder that it resumes from.
        folder = setup.model_folder if lora is None else setup.reference_folder
        model = self._load(folder, config.model_backend, lora if self._ranks is not None else None)
        reference: LanguageModel | Sharded | Literal["elsewhere"] | None = None
        if config.ray.references:
            reference = "elsewhere"
        elif learner.needs_first_weights and lora is None:
            reference = self._load(setup.reference_folder, config.model_backend)
        if config.ray.critics:
            learner = replace(learner, critic=CriticConfig(trunk="none"))
        self._learner = Learner(
            model,
            learner,
            config.optimizer,
            total_steps=config.steps,
            temperature=config.sampling.temperature,
            reference=reference,
        )
        return os.getpid()

    def act_on(self, method: Callable[[Learner, TrainingBatch], R], batch: TrainingBatch) -> R:
        """Calls a method of the learner with a batch, the same on all ranks; only rank 0 returns its result.

        No tensor leaves on a GPU, which the process that reads it may not have.
        """
        return _from_rank_0(self._rank, method(self._learner, batch))

    def read_values(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Returns the result of the critic's `read` on a batch, from rank 0."""
        assert self._learner.critic is not None
        return _from_rank_0(self._rank, self._learner.critic.read(batch))

    def ship(self, dtype: str) -> Shipment | None:
        """Stores the current weights in the cluster, and returns what is known of them, from rank 0.

        They are in the engines' type, and replace those that were shipped before.
        """
        own = str(next(self._learner.model.parameters()).dtype).removeprefix("torch.")
        self._shipment, self._shipment_key = None, (self.num_steps(), None if dtype == own else dtype)
        self._shipment = self._store(self._shipment_key[1])
        if self._is_colocated:
            torch.cuda.empty_cache()  # an engine on this GPU takes its memory back
        return self._shipment

    def _store(self, dtype: str | None) -> Shipment | None:
        """Gathers the weights of all ranks, in this type or their own, and stores them if this is rank 0."""
        weights = self._learner.weights(trained_only=False)
        if self._rank == 0:
            return store_weights((name, cast_tensor(tensor, dtype)) for name, tensor in weights)
        for _ in weights:
            pass
        return None

    def copy_state(self, number: int) -> None:
        """Copies this rank's shards of the learner's state, and keeps its weights, which may have been shipped so."""
        shipment = self._shipment if self._shipment_key == (self.num_steps(), None) else self._store(None)
        self._copies[number] = RankCopy(self._copied_state(), shipment)

    def num_steps(self) -> int:
        """Returns the number of optimizer steps so far."""
        return self._learner.num_steps

    def _state(self, gather: Gather) -> Mapping[str, Any]:
        return self._learner.state_dict(gather)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._learner.load_state_dict(state)
        self._shipment_key = None


class ReferenceActor(RankProcess):
    """One of the processes that have the reference of the KL term: the run's first weights, or a teacher."""

    role = "reference"

    def begin(self, setup: RankSetup) -> int:
        """Joins the other ranks and loads the model; returns the process id."""
        config, learner = setup.config, self._join(setup)
        name = learner.kl.reference
        if name is None:
            source = self._load(setup.reference_folder, config.model_backend)
        else:
            source = self._load(str(model_folder(name)), "auto", is_of_run=False)
        model = model_of(source)
        temperature, ranks = config.sampling.temperature, learner_ranks(source, learner)
        self._model = ReferenceModel(model.requires_grad_(False), learner, temperature, ranks, setup.vocab_size)
        return os.getpid()

    def logprobs(self, batch: TrainingBatch) -> Tensor:
        """Returns the logprobs of a batch's trained targets, `[M]` on the CPU, from rank 0."""
        return _from_rank_0(self._rank, self._model.logprobs(batch))


class CriticActor(SavingRank):
    """One of the processes that share a critic with a backbone of its own."""

    role = "critic"

    def begin(self, setup: RankSetup) -> int:
        """Joins the other ranks and makes the critic of the run's first weights; returns the process id."""
        config, learner = setup.config, self._join(setup)
        lora = learner.lora if learner.lora.rank else None
        source = self._load(setup.reference_folder, config.model_backend, lora)
        model = ready_to_train(model_of(source), learner)
        self._epochs = learner.epochs, learner.minibatches
        self._critic = Critic(
            model,
            learner.critic,
            config.optimizer.for_size(model.num_parameters),
            total_steps=config.steps * learner.steps_per_batch,
            micro_batch_tokens=learner.pass_tokens,
            ranks=learner_ranks(source, learner),
        )
        return os.getpid()

    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Returns the result of `Critic.read`, on the CPU, from rank 0."""
        return _from_rank_0(self._rank, self._critic.read(batch))

    def fit(self, batch: TrainingBatch) -> CriticStats:
        """Fits the critic to a batch as `Critic.fit` does."""
        return self._critic.fit(batch, *self._epochs)

    def num_steps(self) -> int:
        """Returns the number of optimizer steps so far."""
        assert self._critic.optimizer is not None, "a shared backbone has no ranks of its own"
        return self._critic.optimizer.num_steps

    def _state(self, gather: Gather) -> Mapping[str, Any]:
        return {"critic": self._critic.state_dict(gather)}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._critic.load_state_dict(state["critic"])


def _from_rank_0(rank: int, result: R) -> R:
    """Returns the result of rank 0, on the CPU; None on the others, whose results no process reads."""
    return cast(R, tree_map_only(Tensor, Tensor.cpu, result) if rank == 0 else None)
