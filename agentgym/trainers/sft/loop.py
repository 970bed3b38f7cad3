"""Supervised fine-tuning: the model learns from demonstrations or rows, with a loss on the reply tokens only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.text_env import TextEnv
from agentgym.model.language_model import LanguageModel
from agentgym.model.routing import BatchRouting
from agentgym.settings import check_at_least
from agentgym.trainers.learner.token_logprobs import score_targets
from agentgym.trainers.parallel.gradient_threads import MicroResult
from agentgym.trainers.parallel.world import LearnerRanks, Sharded, model_of
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig, UsualOptimizer
from agentgym.trainers.sft.demonstrations import Demonstration, DemonstrationConfig, stream
from agentgym.trainers.sft.lesson_batches import (
    LessonPart,
    TargetRows,
    check_vocabulary,
    lesson_world,
    most_tokens,
    share_batch,
)
from agentgym.trainers.sft.lesson_state import LessonState

__all__ = ["ImitationConfig", "ImitationStep", "Validation", "imitate", "learn", "mean_loss", "passes"]

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
    """CPU threads that share a step's demonstrations; changes how they are split, so it belongs to the recipe."""
    micro_batch_tokens: int | None = None
    """The most tokens of a forward pass; a row is never cut. None is no bound on a CPU,
    and on a GPU what its memory allows, up to 16,384."""
    activation_checkpointing: bool = False
    """Recomputes each layer's inner states in the backward pass: more arithmetic, and less memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_at_least(1, self, "steps", "episodes", "threads")
        if self.micro_batch_tokens is not None:
            check_at_least(1, self, "micro_batch_tokens")

    def begin(self, pupil: LanguageModel | Sharded) -> LessonState:
        """Returns the state of a model that has learned nothing yet."""
        return LessonState(pupil, self.lora, self.with_optimizer(model_of(pupil)).optimizer, self.steps, "imitation")

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
    model.set_recompute(config.activation_checkpointing)
    most = most_tokens(model, config.micro_batch_tokens, recomputes=config.activation_checkpointing)

    def learn_batch() -> tuple[Sequence[Demonstration], float]:
        batch = [row.first(model.context_window + 1) for row in itertools.islice(shown, config.episodes)]
        return batch, _add_gradients(model, batch, world, state.optimizer.parameters, most)

    def tell(step: int, learned: tuple[Sequence[Demonstration], float], norm: float, elapsed_s: float) -> None:
        report = _report(step, *learned, norm, elapsed_s)
        if validation is not None and validation.is_due(step, config.steps):
            measured = world.run(partial(mean_loss, model, validation.rows, config.episodes, world, most))
            report = replace(report, validation_loss=measured)
        on_step(report)

    with lesson_world(state.ranks, model.embed.device, config.threads) as world:
        try:
            state.take_steps(config.steps, world, learn_batch, tell)
        finally:
            if state is not pupil:
                state.merge()


@torch.no_grad()
def mean_loss(
    model: LanguageModel, rows: Sequence[Demonstration], size: int, world: LearnerRanks, most: int | None = None
) -> float:
    """Returns the mean loss over the imitated tokens of all rows, in nats.

    `size` rows are computed at a time, in passes of at most `most` tokens.
    """

    def loss_of(part: LessonPart[Demonstration]) -> Tensor:
        return imitation_losses(model, part.rows, world)[0].double() * (not part.is_idle)

    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    parts = [part for batch in batches for part in share_batch(batch, _num_tokens, world, most)]
    losses = [loss_of(part) for part in parts] if world.size == 1 else world.map(loss_of, parts)
    return _total(losses, world) / max(1, sum(sum(row.mask[1:]) for row in rows))


def _add_gradients(
    model: LanguageModel,
    batch: Sequence[Demonstration],
    world: LearnerRanks,
    parameters: Sequence[Tensor],
    most: int | None,
) -> float:
    """Adds the gradient of the mean loss over the imitated tokens to the parameters, and returns that loss."""
    total = max(1, sum(sum(demonstration.mask) for demonstration in batch))

    def loss_of(part: LessonPart[Demonstration]) -> MicroResult[Tensor]:
        loss, balance = (part_sum / total for part_sum in imitation_losses(model, part.rows, world))
        if part.is_idle:
            loss, balance = 0 * loss, 0 * balance
        return MicroResult(loss + balance, loss.detach().double())

    parts = share_batch(batch, _num_tokens, world, most, threads=True)
    return _total(world.accumulate(parts, loss_of, parameters), world)


def _total(losses: Sequence[Tensor], world: LearnerRanks) -> float:
    """Returns the sum of the losses of all ranks."""
    return float(sum(world.gather_scalars(sum(losses, torch.zeros((), dtype=torch.double, device=world.device)))))


def _num_tokens(demonstration: Demonstration) -> int:
    return len(demonstration.ids)


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


def imitation_losses(
    model: LanguageModel, demonstrations: Sequence[Demonstration], world: LearnerRanks
) -> tuple[Tensor, Tensor]:
    """Returns the negative log likelihood, summed over the imitated tokens, and the load balancing loss of experts.

    That of a row is weighted by its imitated tokens and by what the model's config.json says; 0 without experts.
    """
    rows = TargetRows.of(demonstrations)
    layout = rows.layout(world)
    if model.balance_coefficient:
        layout.routing = BatchRouting(rows.seqlens)
    target_M = rows.target_M.to(world.device)

    def read(hidden_ME: Tensor, head_VE: Tensor) -> tuple[Tensor, Tensor]:
        loss = -score_targets(hidden_ME, head_VE, target_M, softcap=model.softcap).logp_N.sum()
        if layout.routing is None:
            return loss, torch.zeros_like(loss)
        imitated_B = torch.tensor(rows.num_targets, device=world.device)
        return loss, model.balance_coefficient * (imitated_B * layout.routing.balance_loss_B).sum()

    found: tuple[Tensor, Tensor] = model(rows.ids_N.to(world.device), layout, read)
    return found
