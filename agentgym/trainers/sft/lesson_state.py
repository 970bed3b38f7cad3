"""The state of learning from recorded text: the weights, the adapters and the optimizer; its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentgym.errors import TrainingHalted
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.trainers.checkpoints.checkpoint import LocalContent
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.learner.lora import Adapters, Unadapted
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.parallel.gradient_threads import GradientWorkers, one_core
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["LessonState"]

T = TypeVar("T")


class LessonState:
    """A model that learns, on which adapters are put if these are trained, and its optimizer of `num_steps` steps.

    `kind` names the steps in errors.
    """

    def __init__(
        self, model: LanguageModel, lora: LoraConfig, optimizer: OptimizerConfig, num_steps: int, kind: str
    ) -> None:
        self.model, self._kind = model, kind
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
        """Copies the weights, with adapters merged in, and what `load` takes."""
        state = {"optimizer": self.optimizer.state_dict()}
        if self.adapters is None:
            return LocalContent.of(self.model, published_views(self.model), state, self._memory)
        state["lora"] = self.adapters.state_dict()
        return LocalContent.of(self.model, self.adapters.merged_weights(adapted_only=False), state, self._memory)

    def merge(self) -> None:
        """Merges the adapters into the weights; the model learns no further."""
        if self.adapters is not None:
            with one_core():  # for the same bits whatever the threads
                self.adapters.merge()

    def take_steps(
        self,
        steps: int,
        workers: GradientWorkers,
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
            norm = workers.run(self.optimizer.step)
            if not math.isfinite(norm):
                raise TrainingHalted(f"the gradient of {self._kind} step {step} is not finite; lower the learning rate")
            report(step, found, norm, time.perf_counter() - started)

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a checkpoint, whose weights the model has, or those under the adapters if it has some."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.adapters is not None:
            self.adapters.load_state_dict(state["lora"])
