"""The learner of a run on a cluster: groups of ranks with models of their own, behind the interface of `Learner`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.checkpoint import CRITIC, LEARNER
from agentgym.trainers.cluster.actors import Actor, ActorLost, together
from agentgym.trainers.cluster.rank_process import Beginning
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.mismatch import UNBOUNDED, MismatchBound
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.parts.parts import LearnerLost

__all__ = ["ClusterLearner", "RankGroup"]


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks that have a model together; all of them do each operation."""

    ranks: Sequence[Actor]
    part: str = ""
    """The subfolder of a checkpoint with what the group trains."""

    def begin(self, beginning: Beginning) -> None:
        """Makes the ranks join each other and load their model."""
        (address,) = together(self.ranks[:1], "meeting_place")
        self.ask("begin", replace(beginning, address=address))

    def ask(self, method: str, *arguments: object) -> Any:
        """Calls the same method on all ranks and returns rank 0's result; raises LearnerLost if a rank is gone."""
        return self.ask_all(method, *arguments)[0]

    def ask_all(self, method: str, *arguments: object) -> list[Any]:
        """Calls the same method on all ranks and returns their results; raises LearnerLost if a rank is gone."""
        try:
            return together(self.ranks, method, *arguments)
        except ActorLost as error:
            raise LearnerLost(f"{error}; the other ranks cannot go on without it") from error


class ClusterLearner:
    """The ranks of a learner, and those of its reference and its critic where they have their own.

    This process has no weights.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Sequence[Actor],
        references: Sequence[Actor] = (),
        critics: Sequence[Actor] = (),
    ) -> None:
        self.config = config.learner
        self.temperature = config.sampling.temperature
        self.ranks = RankGroup(ranks, LEARNER)
        self._references = RankGroup(references) if references else None
        self._critics = RankGroup(critics, CRITIC) if critics else None
        self.critic = _DistantCritic(self.ranks, self._critics) if self.config.critic.exists else None

    @property
    def saved_groups(self) -> list[RankGroup]:
        """The groups whose state a checkpoint contains, the learner's first."""
        return [self.ranks, *([] if self._critics is None else [self._critics])]

    def begin(self, beginning: Beginning) -> None:
        """Makes the ranks of each group join each other and load their models."""
        for group in (self.ranks, self._references, self._critics):
            if group is not None:
                group.begin(beginning)

    def update(self, batch: TrainingBatch, *, version: int = 0, bound: MismatchBound = UNBOUNDED) -> StepStats:
        """See `Learner.update`."""
        options = {"version": version, "bound": bound}
        stats: StepStats = self.ranks.ask("act_on", self._with_reference(batch), "update", options)
        return stats

    def measure(self, batch: TrainingBatch) -> StepStats:
        """See `Learner.measure`."""
        stats: StepStats = self.ranks.ask("act_on", self._with_reference(batch), "measure", {})
        return stats

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """See `Learner.update_critic`."""
        if self.critic is None:
            return None
        group = self._critics
        stats: CriticStats
        stats = self.ranks.ask("act_on", batch, "update_critic", {}) if group is None else group.ask("fit", batch)
        return stats

    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """See `Learner.logprobs`."""
        return self._tensor(batch, "logprobs", {"temperature": temperature})

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """See `Learner.penalties`."""
        return self._tensor(self._with_reference(batch), "penalties", {})

    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """See `Learner.gradient_proxies`."""
        return self._tensor(batch, "gradient_proxies", {})

    @property
    def num_steps(self) -> int:
        """See `Learner.num_steps`."""
        return sum(int(group.ask("num_steps")) for group in self.saved_groups)

    def close(self) -> None:
        """Does nothing: the cluster ends its actors."""

    def _with_reference(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with the logprobs of a reference that has ranks of its own."""
        if self._references is None or not batch.num_rows:
            return batch
        mask_N = batch.mask_N.cpu()
        reference_logp_N = torch.zeros(len(mask_N))
        reference_logp_N[mask_N] = self._references.ask("logprobs", batch).float()
        return replace(batch, reference_logp_N=reference_logp_N)

    def _tensor(self, batch: TrainingBatch, method: str, options: dict[str, object]) -> Tensor:
        found: Tensor = self.ranks.ask("act_on", batch, method, options)
        return found


@dataclass(frozen=True, eq=False)
class _DistantCritic:
    """The critic of the learner's ranks, or of ranks of its own."""

    learner: RankGroup
    own: RankGroup | None

    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """See `Critic.read`."""
        found: tuple[Tensor, Tensor]
        found = self.learner.ask("read_values", batch) if self.own is None else self.own.ask("read", batch)
        return found
