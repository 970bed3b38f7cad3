"""Supervised fine-tuning: the model learns from demonstrations or rows, with a loss on the reply tokens only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.text_env import TextEnv
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig, UsualOptimizer
from agentgym.trainers.sft.demonstrations import Demonstration, DemonstrationConfig, stream
from agentgym.trainers.sft.lesson import LessonConfig, Validation, take_lesson
from agentgym.trainers.sft.lesson_batches import check_vocabulary, imitation_batch
from agentgym.trainers.sft.lesson_state import LessonState

__all__ = ["ImitationConfig", "ImitationStep", "imitate", "learn"]


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(LessonConfig):
    """The settings of an imitation."""

    usual: ClassVar[UsualOptimizer] = UsualOptimizer(("muon", 2e-3), ("adamw", 2e-5), 30)
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(decay="linear"))
    steps: int = 500
    """Optimizer steps."""

    @property
    def loss_learner(self) -> LearnerConfig:
        """The learner's settings: with an advantage of 1, `reinforce` is the negative log likelihood."""
        return replace(self.learner, loss="reinforce")


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
    """Trains a model in place on the demonstrations `shown`, see `take_lesson`.

    Ids past the model's context window are not learned.
    """
    model = pupil if isinstance(pupil, LanguageModel) else pupil.model
    check_vocabulary(renderer, model)
    rows = (row.first(model.context_window + 1) for row in shown)

    def report(
        step: int,
        batch: Sequence[Demonstration],
        stats: StepStats | None,
        measured: StepStats | None,
        elapsed_s: float,
    ) -> None:
        outcomes = [row.success for row in batch if row.success is not None]
        report = ImitationStep(
            step=step,
            loss=0.0 if stats is None else stats.loss,
            grad_norm=0.0 if stats is None else stats.grad_norm,
            tokens=sum(len(row.ids) for row in batch),
            imitated_tokens=sum(sum(row.mask) for row in batch),
            success=sum(outcomes) / len(outcomes) if outcomes else None,
            elapsed_s=elapsed_s,
            validation_loss=None if measured is None else measured.loss,
        )
        on_step(report)

    take_lesson(pupil, config, rows, imitation_batch, report, validation)
