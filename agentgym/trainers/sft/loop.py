"""Supervised fine-tuning: the model learns from demonstrations or rows, with a loss on the reply tokens only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.text_env import TextEnv
from agentgym.model.language_model import LanguageModel
from agentgym.settings import check_at_least
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.parallel.world import Sharded, model_of
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig, UsualOptimizer
from agentgym.trainers.sft.demonstrations import Demonstration, DemonstrationConfig, stream
from agentgym.trainers.sft.lesson_batches import check_vocabulary, imitation_batch, most_tokens
from agentgym.trainers.sft.lesson_state import LessonState

__all__ = ["ImitationConfig", "ImitationStep", "Validation", "imitate", "learn", "passes"]

T = TypeVar("T")

USUAL = UsualOptimizer(("muon", 2e-3), ("adamw", 2e-5), 30)


@dataclass(frozen=True, kw_only=True)
class ImitationConfig:
    """The settings of an imitation: its demonstrations, its optimizer and its length."""

    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(decay="linear"))
    """The optimizer; without a name or rate it is Muon at 2e-3 below 50 million parameters, and AdamW at 2e-5 above."""
    steps: int = 500
    """Optimizer steps."""
    episodes: int = 8
    """Demonstrations, or rows, per step."""
    threads: int = 2
    """CPU threads, each with forward passes of its own; their number never changes a result."""
    micro_batch_tokens: int | None = None
    """The most tokens of a forward pass; a row is never cut. None is 2,048, and on a GPU up to 16,384, as its memory
    allows."""
    activation_checkpointing: bool = False
    """Recomputes each layer's inner states in the backward pass: more arithmetic, and less memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_at_least(1, self, "steps", "episodes", "threads")
        if self.micro_batch_tokens is not None:
            check_at_least(1, self, "micro_batch_tokens")

    def begin(self, pupil: LanguageModel | Sharded) -> LessonState:
        """Returns the state of a model that has learned nothing yet."""
        model = model_of(pupil)
        tokens = most_tokens(model, self.micro_batch_tokens, recomputes=self.activation_checkpointing)
        learner = LearnerConfig(
            loss="reinforce",  # which with an advantage of 1 is the negative log likelihood
            micro_batch_tokens=tokens,
            threads=self.threads,
            activation_checkpointing=self.activation_checkpointing,
            lora=self.lora,
        )
        return LessonState(pupil, learner, self.with_optimizer(model).optimizer, self.steps)

    def with_optimizer(self, model: LanguageModel) -> ImitationConfig:
        """Returns the settings with the optimizer and the rate for this model, where none is given."""
        return replace(self, optimizer=self.optimizer.for_size(model.num_parameters, USUAL, self.steps))


@dataclass(frozen=True, kw_only=True)
class ImitationStep:
    """The report of one step; the loss is the mean over imitated tokens, in nats."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    """The number of ids in the step's demonstrations."""
    imitated_tokens: int
    """The number of ids that were learned."""
    success: float | None
    """The share of the step's demonstrations that succeeded; None for conversations, which do not record it."""
    elapsed_s: float
    """The seconds since training began."""
    validation_loss: float | None = None
    """The loss of the rows of validation after the step, where it was measured."""


@dataclass(frozen=True)
class Validation(Generic[T]):
    """Rows or pairs that are not learned, whose loss is measured after every `every` steps and after the last."""

    rows: Sequence[T]
    every: int

    def is_due(self, step: int, last: int) -> bool:
        """Returns True if it is measured after this step."""
        return step % self.every == 0 or step == last


def imitate(
    model: LanguageModel,
    renderer: Renderer,
    envs: Sequence[TextEnv],
    config: ImitationConfig,
    *,
    first_seed: int = 0,
    on_step: Callable[[ImitationStep], None] = lambda step: None,
) -> None:
    """Trains `model` in place on fresh demonstrations, the environments in turn; no task is seen twice. See `learn`."""
    learn(model, renderer, stream(envs, renderer, first_seed, config.demonstrations), config, on_step=on_step)


def learn(
    pupil: LanguageModel | LessonState,
    renderer: Renderer,
    shown: Iterator[Demonstration],
    config: ImitationConfig,
    *,
    validation: Validation[Demonstration] | None = None,
    on_step: Callable[[ImitationStep], None] = lambda step: None,
) -> None:
    """Trains a model in place on the demonstrations `shown`, `config.episodes` per step.

    With the state of one that has learned already, training goes on; `shown` begins with what comes next then.
    Ids past the model's context window are not learned. An exception of `on_step` ends the training between two steps.
    Raises TrainingHalted for a gradient that is not finite, with the weights of the step before. Adapters are merged
    into the weights at the end, whatever ends the training, but not those of a state.
    """
    state = pupil if isinstance(pupil, LessonState) else config.begin(pupil)
    model = state.model
    check_vocabulary(renderer, model)
    held_out = None if validation is None else imitation_batch(validation.rows)

    def next_batch() -> tuple[Sequence[Demonstration], TrainingBatch]:
        rows = [row.first(model.context_window + 1) for row in itertools.islice(shown, config.episodes)]
        return rows, imitation_batch(rows)

    def report_step(step: int, rows: Sequence[Demonstration], stats: StepStats | None, elapsed_s: float) -> None:
        loss, norm = (0.0, 0.0) if stats is None else (state.loss_of(stats), stats.grad_norm)
        report = _report(step, rows, loss, norm, elapsed_s)
        if validation is not None and held_out is not None and validation.is_due(step, config.steps):
            report = replace(report, validation_loss=state.loss_of(state.learner.measure(held_out)))
        on_step(report)

    try:
        state.take_steps(config.steps, next_batch, report_step)
    finally:
        if state is not pupil:
            state.close()


def _report(step: int, batch: Sequence[Demonstration], loss: float, norm: float, elapsed_s: float) -> ImitationStep:
    return ImitationStep(
        step=step,
        loss=loss,
        grad_norm=norm,
        tokens=sum(len(demonstration.ids) for demonstration in batch),
        imitated_tokens=sum(sum(demonstration.mask) for demonstration in batch),
        success=_share(batch),
        elapsed_s=elapsed_s,
    )


def _share(batch: Sequence[Demonstration]) -> float | None:
    known = [demonstration.success for demonstration in batch if demonstration.success is not None]
    return sum(known) / len(known) if known else None


def passes(rows: Sequence[T], seed: int) -> Iterator[T]:
    """Yields the rows endlessly, each pass in another order, which follows from the seed.

    A step at the end of one pass continues with the next.
    """
    for number in itertools.count():
        for place in np.random.default_rng([seed, number]).permutation(len(rows)):
            yield rows[place]
