"""The state of learning from recorded text: the weights, the adapters and the optimizer; its steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from agentgym.errors import TrainingHalted
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.trainers.checkpoints.checkpoint import LocalContent
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.learner.lora import Adapters, Unadapted
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.monitoring.collapse import MAX_MERGE_LOST
from agentgym.trainers.parallel.gradient_threads import one_core
from agentgym.trainers.parallel.sharded_tensor import whole
from agentgym.trainers.parallel.world import LearnerRanks, Sharded, model_of
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from agentgym.trainers.parallel.ranks import Ranks

__all__ = ["LessonState"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LessonState:
    """A model that learns, on which adapters are put if these are trained, and its optimizer of `num_steps` steps.

    A sharded model has its adapters already, and all of its ranks call the same methods. `kind` names the steps in
    errors.
    """

    def __init__(
        self, pupil: LanguageModel | Sharded, lora: LoraConfig, optimizer: OptimizerConfig, num_steps: int, kind: str
    ) -> None:
        self.ranks: LearnerRanks | None = pupil.ranks if isinstance(pupil, Sharded) else None
        self.model = model = model_of(pupil)
        self._kind = kind
        self.adapters = Adapters.of(model, None, lora) if lora.rank else None
        self.optimizer = PolicyOptimizer(model, lora.optimizer_settings(optimizer), num_steps)
        self.first: LanguageModel | Unadapted = model if self.adapters is None else self.adapters.reference
        """The model as it was first; with adapters, without them. A lesson that compares with it sets a copy."""
        self.elapsed_s = 0.0
        """The seconds of the steps before those of this process."""
        self._memory = CopyMemory()

    @property
    def num_done(self) -> int:
        """The number of steps that are done."""
        return self.optimizer.num_steps

    def copy(self) -> LocalContent:
        """Copies the weights, with adapters merged in, and what `load` takes; of sharded ones only rank 0 has any."""
        state = {"optimizer": self.optimizer.state_dict(self._gather)}
        if self.adapters is not None:
            state["lora"] = self.adapters.state_dict(self._gather)
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

    def merge(self) -> None:
        """Merges the adapters of a whole model into its weights; it learns no further."""
        if self.adapters is not None and self.ranks is None:
            with one_core():  # for the same bits whatever the threads
                self.adapters.merge()
            if (lost := self.adapters.merge_lost or 0.0) > MAX_MERGE_LOST:
                text = "the model lacks %.0f%% of what its adapters learned, less than a bit: learn in float32 (%s)"
                logger.warning(text, 100 * lost, "--dtype float32")

    def take_steps(
        self,
        steps: int,
        world: LearnerRanks,
        add_gradients: Callable[[], T],
        report: Callable[[int, T, float, float], None],
    ) -> None:
        """Takes the steps up to `steps` that are not done yet.

        `add_gradients` adds a step's gradients, and `report` gets its number, their result, the gradient's norm and the
        seconds so far. Raises TrainingHalted for a gradient that is not finite, with the weights of the step before.
        """
        started = time.perf_counter() - self.elapsed_s
        for step in range(self.num_done + 1, steps + 1):
            found = add_gradients()
            norm = world.run(self.optimizer.step)
            if not math.isfinite(norm):
                raise TrainingHalted(f"the gradient of {self._kind} step {step} is not finite; lower the learning rate")
            report(step, found, norm, time.perf_counter() - started)

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a checkpoint, whose weights the model has, or those under the adapters if it has some."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.adapters is not None:
            self.adapters.load_state_dict(state["lora"])
