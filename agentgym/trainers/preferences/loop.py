"""Learning from preferences: the settings, and the steps over many pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from agentgym.model.language_model import LanguageModel
from agentgym.settings import check_at_least
from agentgym.trainers.algorithms.losses import PreferenceForm, loss_with
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.parallel.world import Sharded, model_of
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig, UsualOptimizer
from agentgym.trainers.sft.demonstrations import Pair
from agentgym.trainers.sft.lesson_batches import most_tokens, pair_batch
from agentgym.trainers.sft.lesson_state import LessonState
from agentgym.trainers.sft.loop import Validation

__all__ = ["PreferenceConfig", "PreferenceStep", "learn_preferences"]

USUAL = UsualOptimizer(("adamw", 5e-5), ("adamw", 1e-6), 10)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The settings of learning from preferences."""

    loss: PreferenceForm = "sigmoid"
    """`sigmoid` is DPO (Rafailov et al. 2023), `ipo` a squared distance to a fixed margin (Azar et al. 2023), `hinge`
    SLiC's (Zhao et al. 2023)."""
    beta: float = 0.1
    """The weight of the divergence from the first weights that the loss stands for; less moves further from them."""
    label_smoothing: float = 0.0
    """The share of pairs whose order is taken for wrong (conservative DPO), in [0, 0.5); of `sigmoid`."""
    sft_weight: float = 0.0
    """The weight of the negative log likelihood of the better reply, per token, beside the loss."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer; its rate is 5e-5 below 50 million parameters, and 1e-6 above, where none is given."""
    steps: int = 100
    """Optimizer steps."""
    pairs: int = 8
    """Pairs per step."""
    threads: int = 2
    """CPU threads, each with forward passes of its own; their number never changes a result."""
    micro_batch_tokens: int | None = None
    """The most tokens of a forward pass; a pair is never split. None is 2,048, and on a GPU up to 16,384, as its memory
    allows."""
    activation_checkpointing: bool = False
    """Recomputes each layer's inner states in the backward pass: more arithmetic, and less memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_at_least(1, self, "steps", "pairs", "threads")
        if self.micro_batch_tokens is not None:
            check_at_least(1, self, "micro_batch_tokens")
        loss_with("preference", self.loss_settings)

    @property
    def loss_settings(self) -> dict[str, object]:
        """The settings of the loss `preference`."""
        names = ("beta", "label_smoothing", "sft_weight")
        return {"form": self.loss, **{name: getattr(self, name) for name in names}}

    def begin(self, pupil: LanguageModel | Sharded, first: LanguageModel | Sharded | None = None) -> LessonState:
        """Returns the state of a model that has learned nothing yet.

        `first` has the weights that it is held against, where they are not its own. Adapters need no such copy.
        """
        model = model_of(pupil)
        tokens = most_tokens(model, self.micro_batch_tokens, recomputes=self.activation_checkpointing)
        learner = LearnerConfig(
            loss="preference",
            loss_settings=self.loss_settings,
            micro_batch_tokens=tokens,
            threads=self.threads,
            activation_checkpointing=self.activation_checkpointing,
            lora=self.lora,
        )
        return LessonState(pupil, learner, self.with_optimizer(model).optimizer, self.steps, first)

    def with_optimizer(self, model: LanguageModel) -> PreferenceConfig:
        """Returns the settings with the optimizer and the rate for this model, where none is given."""
        return replace(self, optimizer=self.optimizer.for_size(model.num_parameters, USUAL, self.steps))


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
    """Trains a model in place on `config.pairs` pairs a step; the first weights are kept as the reference.

    With the state of one that has learned already, training goes on; `pairs` begin with what comes next then.
    An exception of `on_step` ends the training between two steps. Raises TrainingHalted for a gradient that is not
    finite, with the weights of the step before. Adapters are merged into the weights at the end, whatever ends it,
    but not those of a state.
    """
    state = pupil if isinstance(pupil, LessonState) else config.begin(pupil)
    held_out = None if validation is None else pair_batch(validation.rows)

    def next_batch() -> tuple[Sequence[Pair], TrainingBatch]:
        batch = list(itertools.islice(pairs, config.pairs))
        return batch, pair_batch(batch)

    def report_step(step: int, batch: Sequence[Pair], stats: StepStats | None, elapsed_s: float) -> None:
        assert stats is not None and stats.pairs is not None  # a pair has targets
        report = PreferenceStep(
            step=step,
            loss=state.loss_of(stats),
            grad_norm=stats.grad_norm,
            tokens=sum(pair.num_tokens for pair in batch),
            elapsed_s=elapsed_s,
            **vars(stats.pairs),
        )
        if validation is not None and held_out is not None and validation.is_due(step, config.steps):
            measured = state.learner.measure(held_out)
            assert measured.pairs is not None
            accuracy = measured.pairs.accuracy
            report = replace(report, validation_loss=state.loss_of(measured), validation_accuracy=accuracy)
        on_step(report)

    try:
        state.take_steps(config.steps, next_batch, report_step)
    finally:
        if state is not pupil:
            state.close()
