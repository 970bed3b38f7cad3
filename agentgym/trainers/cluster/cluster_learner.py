"""The learner of a run on a cluster: it has the interface of `Learner`, and calls groups of ranks on the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.checkpoint import CRITIC, LEARNER
from agentgym.trainers.cluster.actors import Actor, ActorLost, call_all
from agentgym.trainers.cluster.rank_actor import CriticActor, RankActor, ReferenceActor
from agentgym.trainers.cluster.rank_process import RankProcess, RankSetup, SavingRank
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.mismatch import UNBOUNDED, MismatchBound
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.parts.parts import LearnerLost

__all__ = ["ClusterLearner", "RankGroup"]

# Shape suffixes: N packed tokens, M trained targets, R rows.

K = TypeVar("K", bound=RankProcess, covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class RankGroup(Generic[K]):
    """The ranks that share a model: each operation is called on all of them."""

    ranks: Sequence[Actor[K]]
    part: str = ""
    """The subfolder of a checkpoint with the state of the group; "" for a group that trains nothing."""

    def begin(self, setup: RankSetup) -> None:
        """Makes the ranks join each other and load their model."""
        (address,) = call_all(self.ranks[:1], RankProcess.rendezvous_address)
        self.ask(RankProcess.begin, replace(setup, address=address))

    def ask(self, method: Callable[Concatenate[K, P], R], *arguments: P.args, **kwargs: P.kwargs) -> R:
        """Calls the same method on all ranks and returns rank 0's result; raises LearnerLost if a rank is gone."""
        return self.ask_all(method, *arguments, **kwargs)[0]

    def ask_all(self, method: Callable[Concatenate[K, P], R], *arguments: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls the same method on all ranks and returns their results; raises LearnerLost if a rank is gone."""
        try:
            return call_all(self.ranks, method, *arguments, **kwargs)
        except ActorLost as error:
            raise LearnerLost(f"{error}; the other ranks cannot go on without it") from error


class ClusterLearner:
    """A learner on ranks in other processes; its reference and its critic may have ranks of their own.

    This process has no weights.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Sequence[Actor[RankActor]],
        references: Sequence[Actor[ReferenceActor]] = (),
        critics: Sequence[Actor[CriticActor]] = (),
    ) -> None:
        self.config = config.learner
        self.temperature = config.sampling.temperature
        self.ranks = RankGroup(ranks, LEARNER)
        self._references = RankGroup(references) if references else None
        self._critics = RankGroup(critics, CRITIC) if critics else None
        self.critic = _RemoteCritic(self.ranks, self._critics) if self.config.critic.exists else None

    @property
    def saved_groups(self) -> list[RankGroup[SavingRank]]:
        """The groups whose state a checkpoint contains, the learner's first."""
        return [self.ranks, *([] if self._critics is None else [self._critics])]

    def begin(self, setup: RankSetup) -> None:
        """Makes the ranks of each group join each other and load their models."""
        groups: tuple[RankGroup[RankProcess] | None, ...] = (self.ranks, self._references, self._critics)
        for group in groups:
            if group is not None:
                group.begin(setup)

    def update(self, batch: TrainingBatch, *, version: int = 0, bound: MismatchBound = UNBOUNDED) -> StepStats:
        """Updates the policy on a batch, on all ranks at once; errors are those of `Learner.update`."""
        update = partial(Learner.update, version=version, bound=bound)
        return self.ranks.ask(RankActor.act_on, update, self._with_reference(batch))

    def measure(self, batch: TrainingBatch) -> StepStats:
        """The statistics of a batch under the current weights, without an update."""
        return self.ranks.ask(RankActor.act_on, Learner.measure, self._with_reference(batch))

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """Updates the critic on a batch, on the ranks that have it; returns None without a critic."""
        if self.critic is None:
            return None
        if self._critics is not None:
            return self._critics.ask(CriticActor.fit, batch)
        return self.ranks.ask(RankActor.act_on, Learner.update_critic, batch)

    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """The logprobs of the batch's trained targets, `[M]`, at `temperature`; None is the temperature of training."""
        return self.ranks.ask(RankActor.act_on, partial(Learner.logprobs, temperature=temperature), batch)

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """The KL penalty to subtract from the reward of each trained target, `[M]`."""
        return self.ranks.ask(RankActor.act_on, Learner.penalties, self._with_reference(batch))

    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """The squared norm of each trained target's gradient with respect to the logits, `[M]`."""
        return self.ranks.ask(RankActor.act_on, Learner.gradient_proxies, batch)

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps so far, with those of a critic on ranks of its own."""
        return sum(group.ask(SavingRank.num_steps) for group in self.saved_groups)

    def close(self) -> None:
        """Does nothing: the cluster ends its actors."""

    def _with_reference(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with the reference's logprobs, 0 at untrained tokens, if the reference has ranks of its own."""
        if self._references is None or not batch.num_rows:
            return batch
        mask_N = batch.mask_N.cpu()
        reference_logp_N = torch.zeros(len(mask_N))
        reference_logp_N[mask_N] = self._references.ask(ReferenceActor.logprobs, batch).float()
        return replace(batch, reference_logp_N=reference_logp_N)


@dataclass(frozen=True, eq=False)
class _RemoteCritic:
    """The critic on the learner's ranks, or on ranks of its own."""

    learner: RankGroup[RankActor]
    own: RankGroup[CriticActor] | None

    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The values of the trained targets, `[M]`, and those after the last id of each row, `[R]`."""
        if self.own is not None:
            return self.own.ask(CriticActor.read, batch)
        return self.learner.ask(RankActor.read_values, batch)
