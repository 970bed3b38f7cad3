"""Learning from preferences: the settings, and the steps over many pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from agentgym.model.language_model import LanguageModel
from agentgym.trainers.algorithms.losses import PreferenceForm, loss_with
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import UsualOptimizer
from agentgym.trainers.sft.demonstrations import Pair
from agentgym.trainers.sft.lesson import LessonConfig, Validation, take_lesson
from agentgym.trainers.sft.lesson_batches import pair_batch
from agentgym.trainers.sft.lesson_state import LessonState

__all__ = ["PreferenceConfig", "PreferenceStep", "learn_preferences"]


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(LessonConfig):
    """The settings of learning from preferences."""

    usual: ClassVar[UsualOptimizer] = UsualOptimizer(("adamw", 5e-5), ("adamw", 1e-6), 10)
    loss: PreferenceForm = "sigmoid"
    """`sigmoid` is DPO (Rafailov et al. 2023), `ipo` a squared distance to a fixed margin (Azar et al. 2023), `hinge`
    SLiC's (Zhao et al. 2023)."""
    beta: float = 0.1
    """The weight of the divergence from the first weights that the loss stands for; less moves further from them."""
    label_smoothing: float = 0.0
    """The share of pairs whose order is taken for wrong (conservative DPO), in [0, 0.5); of `sigmoid`."""
    sft_weight: float = 0.0
    """The weight of the negative log likelihood of the better reply, per token, beside the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        loss_with("preference", self.loss_settings)

    @property
    def loss_settings(self) -> dict[str, object]:
        """The settings of the loss `preference`."""
        names = ("beta", "label_smoothing", "sft_weight")
        return {"form": self.loss, **{name: getattr(self, name) for name in names}}

    @property
    def loss_learner(self) -> LearnerConfig:
        """The learner's settings; the loads of experts are balanced if that is set, whatever the model's own are."""
        router = replace(self.learner.router, balance=self.learner.router.balance or 0.0)
        return replace(self.learner, loss="preference", loss_settings=self.loss_settings, router=router)


@dataclass(frozen=True, kw_only=True)
class PreferenceStep:
    """The report of a step; means are over its pairs, before its update."""

    step: int
    loss: float
    """The loss that is minimized: `preference_loss`, and `sft_weight` times `sft_loss`."""
    grad_norm: float
    accuracy: float
    """The share of pairs whose better reply has gained more than the worse one since the first weights."""
    margin: float
    """The mean difference of what they gained, in nats times beta."""
    chosen_reward: float
    """The gain of the better replies, in nats times beta."""
    rejected_reward: float
    tokens: int
    elapsed_s: float
    validation_loss: float | None = None
    """The loss of the pairs of validation after the step, where it was measured."""
    validation_accuracy: float | None = None
    """Their accuracy, likewise."""
    preference_loss: float | None = None
    """The loss of the order of the replies alone, see `preference_loss`; None in steps of earlier versions."""
    sft_loss: float | None = None
    """The negative log likelihood of the better replies, in nats per token."""


def learn_preferences(
    pupil: LanguageModel | LessonState,
    pairs: Iterator[Pair],
    config: PreferenceConfig,
    *,
    validation: Validation[Pair] | None = None,
    on_step: Callable[[PreferenceStep], None] = lambda step: None,
) -> None:
    """Trains a model in place on pairs, see `take_lesson`; the first weights are kept as the reference."""

    def report(
        step: int, batch: Sequence[Pair], stats: StepStats | None, measured: StepStats | None, elapsed_s: float
    ) -> None:
        assert stats is not None and stats.pairs is not None  # a pair has targets
        held_out = None if measured is None else measured.pairs
        report = PreferenceStep(
            step=step,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            tokens=sum(pair.num_tokens for pair in batch),
            elapsed_s=elapsed_s,
            validation_loss=None if measured is None else measured.loss,
            validation_accuracy=None if held_out is None else held_out.accuracy,
            **vars(stats.pairs),
        )
        on_step(report)

    take_lesson(pupil, config, pairs, pair_batch, report, validation)
