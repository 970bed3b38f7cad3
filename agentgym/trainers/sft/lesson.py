"""Learning from recorded text: the settings that every kind of it has, and its steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np

from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.settings import check_at_least
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.parallel.world import Sharded, model_of
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig, UsualOptimizer
from agentgym.trainers.sft.lesson_state import LessonState

__all__ = ["LessonConfig", "Validation", "passes", "take_lesson"]

T = TypeVar("T")

PLAYED = ("epochs", "minibatches", "correction", "critic", "ema_decay")
"""Settings of the learner that only runs with episodes have a use for."""


@dataclass(frozen=True, kw_only=True)
class LessonConfig:
    """The settings of learning from recorded text."""

    usual: ClassVar[UsualOptimizer]
    """The optimizer where none is given."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 100
    """Optimizer steps."""
    batch_size: int = 8
    """Rows, demonstrations or pairs of a step."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "steps", "batch_size")
        usual = LearnerConfig()
        for name in PLAYED:
            if getattr(self.learner, name) != getattr(usual, name):
                raise ConfigError(f"learner.{name} is for runs that play episodes: leave it out")
        if self.learner.loss is not None:
            raise ConfigError("learner.loss is that of the command: leave it out")

    @property
    def loss_learner(self) -> LearnerConfig:
        """The settings of the learner with the loss of this kind of learning."""
        raise NotImplementedError

    def begin(self, pupil: LanguageModel | Sharded, first: LanguageModel | Sharded | None = None) -> LessonState:
        """Returns the state of a model that has learned nothing yet.

        `first` has the weights that it is compared with, where they are not its own. Adapters need no such copy.
        """
        optimizer = self.with_optimizer(model_of(pupil)).optimizer
        return LessonState(pupil, self.loss_learner, optimizer, self.steps, first)

    def with_optimizer(self, model: LanguageModel) -> Self:
        """Returns the settings with the optimizer and the rate for this model, where none is given."""
        return replace(self, optimizer=self.optimizer.for_size(model.num_parameters, self.usual, self.steps))


@dataclass(frozen=True)
class Validation(Generic[T]):
    """Rows or pairs that are not learned, whose loss is measured after every `every` steps and after the last."""

    rows: Sequence[T]
    every: int

    def is_due(self, step: int, last: int) -> bool:
        """Returns True if it is measured after this step."""
        return step % self.every == 0 or step == last


def take_lesson(
    pupil: LanguageModel | LessonState,
    config: LessonConfig,
    items: Iterator[T],
    to_batch: Callable[[Sequence[T]], TrainingBatch],
    report: Callable[[int, Sequence[T], StepStats | None, StepStats | None, float], None],
    validation: Validation[T] | None = None,
) -> None:
    """Trains a model in place on `config.batch_size` items a step.

    With the state of one that has learned already, training goes on; `items` begin with what comes next then. `report`
    gets the number of the step, its items, its statistics and those of validation, None where it was not measured, and
    the seconds so far. An exception of it ends the training between two steps. Raises TrainingHalted for a gradient
    that is not finite, with the weights of the step before. Adapters are merged into the weights at the end, whatever
    ends the training, but not those of a state.
    """
    state = pupil if isinstance(pupil, LessonState) else config.begin(pupil)
    held_out = None if validation is None else to_batch(validation.rows)

    def next_batch() -> tuple[Sequence[T], TrainingBatch]:
        batch = list(itertools.islice(items, config.batch_size))
        return batch, to_batch(batch)

    def report_step(step: int, batch: Sequence[T], stats: StepStats | None, elapsed_s: float) -> None:
        measured = None
        if validation is not None and held_out is not None and validation.is_due(step, config.steps):
            measured = state.measure(held_out)
        report(step, batch, stats, measured, elapsed_s)

    try:
        state.take_steps(config.steps, next_batch, report_step)
    finally:
        if state is not pupil:
            state.close()


def passes(rows: Sequence[T], seed: int) -> Iterator[T]:
    """Yields the rows endlessly, each pass in another order, which follows from the seed.

    A step at the end of one pass continues with the next.
    """
    for number in itertools.count():
        for place in np.random.default_rng([seed, number]).permutation(len(rows)):
            yield rows[place]
