"""A learner of recorded text: its steps, and what its checkpoints have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.checkpoint import LocalContent
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.objective import balance_weight
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.monitoring.collapse import MAX_MERGE_LOST
from agentgym.trainers.parallel.gradient_threads import one_core
from agentgym.trainers.parallel.sharded_tensor import whole
from agentgym.trainers.parallel.world import LearnerRanks, Sharded, model_of
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.sft.lesson_batches import most_tokens

if TYPE_CHECKING:
    from agentgym.trainers.parallel.ranks import Ranks

__all__ = ["LessonState"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LessonState:
    """A learner of `num_steps` steps; a loss that compares with the model as it was first takes `first`.

    A sharded model has its adapters already, and all of its ranks call the same methods.
    """

    def __init__(
        self,
        pupil: LanguageModel | Sharded,
        config: LearnerConfig,
        optimizer: OptimizerConfig,
        num_steps: int,
        first: LanguageModel | Sharded | None = None,
    ) -> None:
        self.ranks: LearnerRanks | None = pupil.ranks if isinstance(pupil, Sharded) else None
        model = model_of(pupil)
        tokens = most_tokens(model, config.micro_batch_tokens, recomputes=config.activation_checkpointing)
        config = replace(config, micro_batch_tokens=tokens)
        self.learner = Learner(pupil, config, optimizer, total_steps=num_steps, reference=first)
        self.model, self.adapters = self.learner.model, self.learner.adapters
        self._balance = balance_weight(config, self.model.balance_coefficient)
        self.elapsed_s = 0.0
        """The seconds of the steps before those of this process."""
        self._memory = CopyMemory()

    @property
    def num_done(self) -> int:
        """The number of steps that are done."""
        return self.learner.optimizer.position

    def copy(self) -> LocalContent:
        """Copies the weights, with adapters merged in, and what `load` takes; of sharded ones only rank 0 has any."""
        state = self.learner.state_dict(self._gather)
        if self.ranks is not None:  # gathered tensors are copies
            return LocalContent(self.model.to_hf(), dict(self.weights()), state)
        return LocalContent.of(self.model, self.weights(), state, self._memory)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights by published name, with adapters merged in; of sharded ones rank 0 gets copies."""
        if self.adapters is not None:
            yield from (
                (name, self._gather(tensor)) for name, tensor in self.adapters.merged_weights(adapted_only=False)
            )
        else:
            yield from published_views(self.model, self._gather)

    def rounded_weights(self) -> dict[str, Tensor]:
        """Returns the weights of a sharded model in the type of its passes, on rank 0."""
        dtype = getattr(torch, cast("Ranks", self.ranks).config.param_dtype or "float32")
        return {name: tensor.to(dtype) for name, tensor in self.weights()}

    def _gather(self, tensor: Tensor, of: Tensor | None = None) -> Tensor:
        """Returns the tensor whole: itself, or on the CPU of rank 0, one after the other, if ranks have its parts."""
        found = whole(tensor, of)
        if self.ranks is None:
            return found
        return found.cpu() if self.ranks.rank == 0 else found.new_empty(found.shape, device="meta")

    def agree(self, flag: bool) -> bool:
        """Returns True if the flag is set on any rank; all of them have to call it."""
        if self.ranks is None:
            return flag
        return any(map(bool, self.ranks.gather_scalars(torch.tensor([flag], device=self.ranks.device))))

    def close(self) -> None:
        """Stops the learner's threads, and merges the adapters of a whole model into its weights."""
        self.learner.close()
        if self.adapters is not None and self.ranks is None:
            with one_core():  # for the same bits whatever the threads
                self.adapters.merge()
            if (lost := self.adapters.merge_lost or 0.0) > MAX_MERGE_LOST:
                text = "the model lacks %.0f%% of what its adapters learned, less than a bit: learn in float32 (%s)"
                logger.warning(text, 100 * lost, "--dtype float32")

    def take_steps(
        self,
        steps: int,
        next_batch: Callable[[], tuple[T, TrainingBatch]],
        report: Callable[[int, T, StepStats | None, float], None],
    ) -> None:
        """Takes the steps up to `steps` that are not done yet, each on a batch that was made of something.

        `report` gets the step's number, what its batch was made of, its statistics (None for a batch without targets)
        and the seconds so far. Raises NotFinite for a gradient that is not finite, with the weights of the step before.
        """
        started = time.perf_counter() - self.elapsed_s
        with nullcontext() if self.model.embed.device.type == "cpu" else one_core():  # beside a GPU, one core suffices
            for step in range(self.num_done + 1, steps + 1):
                items, batch = next_batch()
                stats = self._text_stats(self.learner.update(batch, version=step - 1)) if batch.num_rows else None
                self.learner.optimizer.skip_to(step)
                report(step, items, stats, time.perf_counter() - started)

    def measure(self, batch: TrainingBatch) -> StepStats:
        """Returns the statistics of a batch that is not learned."""
        return self._text_stats(self.learner.measure(batch))

    def _text_stats(self, stats: StepStats) -> StepStats:
        """Returns the statistics with the loss of the text alone, without that of the loads of experts."""
        balance = 0.0 if stats.router is None else self._balance * stats.router.router_loss
        return replace(stats, loss=stats.loss - balance)

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a checkpoint, whose weights the model has, or those under the adapters if it has some."""
        self.learner.load_state_dict(state)
